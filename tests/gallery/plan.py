"""Faults at lines of a loop body, as text and drawn from a seed: "w1 kill at amp.py:37#5; w2 pause 0.1 at amp.py:40#4".
`#5`: the fifth time that the worker reaches the line."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_FAULT = re.compile(r"(w\d+) ([a-z]+(?: [\d.]+)?) at (\S+:\d+)#(\d+)")
LETHAL = ("kill", "stop", "hang", "exit", "raise")
_KINDS = {"kill": 60, "leave": 8, "scale": 8, "join": 8, "stop": 5, "hang": 4, "exit": 3, "raise": 4}
_INSIDE_LIBRARY = 0.2
_SECOND = 0.2
_LAG = 0.4
_LAG_S = 0.15
Hits = Mapping[str, Mapping[str, int]]
"""By worker: how often it reaches each line in a job that nothing happens to."""


@dataclass(frozen=True)
class Fault:
    """kind  kill, stop, hang, leave, exit, raise; or pause S, scale N, join N (wait for a newcomer), await N (wait
    for its replacement once N workers are lost and the others train again)"""

    worker: str
    kind: str
    place: str
    hit: int

    def __str__(self) -> str:
        return f"{self.worker} {self.kind} at {self.place}#{self.hit}"

    def as_json(self) -> dict[str, str | int]:
        return {"worker": self.worker, "kind": self.kind, "place": self.place, "hit": self.hit}


@dataclass(frozen=True)
class Case:
    """One job: how many workers it begins with, how they talk, how often a lost one is replaced, what happens; how many
    wait beside, to take the place of a lost one at once."""

    workers: int
    transport: str
    restarts: int
    faults: tuple[Fault, ...]
    spares: int = 0

    def __str__(self) -> str:
        replaced = f", {self.restarts} restarts" if self.restarts else ""
        replaced += f", {self.spares} spares" if self.spares else ""
        return f"{self.workers} workers, {self.transport}{replaced}: {'; '.join(map(str, self.faults)) or 'nothing'}"


def parse(text: str) -> tuple[Fault, ...]:
    """The faults of a text. Raises ValueError for any other text."""
    found = []
    for part in filter(None, map(str.strip, text.split(";"))):
        match = _FAULT.fullmatch(part)
        if match is None:
            raise ValueError(f"not a fault: {part!r}; write: w1 kill at amp.py:37#5")
        found.append(Fault(match[1], match[2], match[3], int(match[4])))
    return tuple(found)


def draw(seed: str, hits: Hits) -> Case:
    """A job for a body whose lines are reached so often."""
    chance = random.Random(seed)
    workers = chance.choice([2, 3, 3, 3, 4])
    kind = chance.choices([*_KINDS], [*_KINDS.values()])[0]
    names = [f"w{number}" for number in range(workers)]
    worker = chance.choice(names)
    lines = hits.get(worker, hits["w0"])
    fault = _at(chance, worker, {"scale": f"scale {workers - 1}", "join": f"join {workers + 1}"}.get(kind, kind), lines)
    faults = [fault]
    if kind in LETHAL and chance.random() < _LAG:
        other = chance.choice([name for name in names if name != worker])
        faults.append(_beside(chance, fault, other, f"pause {_LAG_S}", lines))
    transport, beside = chance.choice(["tcp", "shm"]), chance.choice(["", "", "", "restarts", "restarts", "spares"])
    if workers > 2 and chance.random() < _SECOND:
        other = chance.choice([name for name in names if name != worker])
        faults.append(_at(chance, other, "kill", lines))
    if beside == "restarts" and kind in LETHAL:
        other = chance.choice([name for name in names if name != worker])
        alike = sorted(place for place, count in lines.items() if count > 6 and "/" not in place)
        hit = fault.hit * lines[alike[0]] // lines[fault.place] + chance.randint(2, 4) if alike else 0
        if alike and hit <= lines[alike[0]]:  # it is too late for a newcomer behind the last steps
            faults.append(Fault(other, "await 1", alike[0], hit))
    return Case(
        workers, transport, 3 if beside == "restarts" else 0, tuple(faults), int(beside == "spares" and kind in LETHAL)
    )


def draw_losses(seed: str, hits: Hits, every: int, steps: int) -> Case:
    """A job of so many steps in which a worker is lost about every `every` steps, and each one is replaced: after a
    loss another worker waits until the replacement comes."""
    chance = random.Random(seed)
    workers = chance.choice([2, 3, 3, 4])
    often = {place: count for place, count in hits["w0"].items() if count >= steps}
    own = _even({place: count for place, count in often.items() if "/" not in place})
    lines = {**_even({place: count for place, count in often.items() if "/" in place}), **own}
    since = {f"w{number}": 0 for number in range(workers)}  # the step at which each living worker has come
    faults = []

    def at_step(worker: str, kind: str, step: int, places: Sequence[str]) -> Fault:
        place = chance.choice(places)
        return Fault(worker, kind, place, max(1, (step - since[worker]) * lines[place] // steps))

    for number in range(1, steps // every):
        step = number * every + chance.randint(-every // 4, every // 4)
        victim = chance.choice(sorted(since))
        places = sorted(own if chance.random() >= _INSIDE_LIBRARY else lines)
        faults.append(at_step(victim, chance.choice(["kill", "kill", "kill", "exit"]), step, places))
        del since[victim]
        faults.append(at_step(chance.choice(sorted(since)), f"await {number}", step + 2, sorted(own)))
        since[f"w{workers + number - 1}"] = step + 3
    return Case(workers, chance.choice(["tcp", "shm"]), 1000, tuple(faults))


def _even(lines: Mapping[str, int]) -> dict[str, int]:
    """Lines that run about as often as the loop body. Others, such as those of the data set, are not spread evenly over
    the steps, and a loss there would come at another step."""
    return {place: count for place, count in lines.items() if count < 2 * min(lines.values())}


def every_line(hits: Hits, worker: str, of_library: bool) -> list[Fault]:
    """A kill at each line, the middle one of the times that it is reached."""
    lines = [place for place in sorted(hits[worker]) if ("/" in place) == of_library]
    return [Fault(worker, "kill", place, (hits[worker][place] + 2) // 2) for place in lines]


def _at(chance: random.Random, worker: str, kind: str, lines: Mapping[str, int]) -> Fault:
    inside = [place for place in lines if "/" in place]
    own = [place for place in lines if "/" not in place]
    is_inside = bool(inside) and chance.random() < _INSIDE_LIBRARY and kind != "raise"  # which user code does
    places: Sequence[str] = inside if is_inside else own
    place = chance.choice(sorted(places))
    return Fault(worker, kind, place, chance.randint(1, lines[place]))


def _beside(chance: random.Random, fault: Fault, worker: str, kind: str, lines: Mapping[str, int]) -> Fault:
    """At a line of the same body of the loop, or of the one before."""
    alike = [place for place, count in lines.items() if count == lines[fault.place] and "/" not in place]
    place = chance.choice(sorted(alike) or [fault.place])
    return Fault(worker, kind, place, max(1, fault.hit - chance.randint(0, 1)))
