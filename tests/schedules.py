"""Random schedules of what happens to a job: drawn from a seed alone, so that each can be repeated. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "kill two", "leave", "join", "join, killed"]

MOST_WORKERS = 4
TRAINING: dict[Kind, int] = {"kill": 2, "kill two": 3, "leave": 2, "join": 1, "join, killed": 1}
"""So many workers have to train when it happens: somebody who has the state must stay, or the job is lost."""


@dataclass(frozen=True)
class Event:
    """Happens once the job has begun `step`.

    "kill"          SIGKILL at a worker that trains
    "kill two"      the same, and at another one `pause` / 20 seconds later
    "leave"         SIGTERM at one
    "join"          room for one more
    "join, killed"  the same, and the worker that comes is killed `pause` seconds after it was started, trained or not

    pause           0 to 1; a kill or a leave comes `pause` / 300 seconds after the beginning or end of a step
    """

    step: int
    kind: Kind
    pause: float


@dataclass(frozen=True)
class Schedule:
    """One job, and what happens to it. `replaces`: those that were killed are replaced."""

    seed: int
    num_workers: int
    size: int
    replaces: bool
    pace_ms: float
    mean_each_step: bool
    has_ledger: bool
    events: tuple[Event, ...]

    def __str__(self) -> str:
        how = ", ".join(f"{event.kind} at {event.step}" for event in self.events)
        after = "who is killed is replaced" if self.replaces else "nobody is replaced"
        return f"seed {self.seed}: {self.size} workers with {self.num_workers} loader workers; {how}; {after}"


def draw(seed: int, steps: int) -> Schedule:
    """At least one kill, one leave and one join, within `steps` steps. Even seeds are without loader workers, odd ones
    with two for each worker."""
    chance = random.Random(seed)
    size, replaces = chance.choice([2, 3]), chance.random() < 0.6
    wanted: list[Kind] = ["join", "kill", "leave"]
    wanted += chance.choices(["kill", "kill two", "leave", "join", "join, killed"], k=chance.randint(0, 2))
    chance.shuffle(wanted)
    kinds = _possible(wanted, size, replaces)
    places = [chance.randrange(1, steps) for _ in kinds]
    for index in range(1, len(places)):
        if chance.random() < 0.3:  # close together: what comes in the middle of a regroup matters most
            places[index] = min(steps - 1, places[index - 1] + chance.randint(0, 3))
    events = [Event(step, kind, chance.uniform(0, 1)) for step, kind in zip(sorted(places), kinds, strict=True)]
    return Schedule(
        seed=seed,
        num_workers=2 * (seed % 2),
        size=size,
        replaces=replaces,
        pace_ms=chance.choice([2.0, 4.0, 6.0]),
        mean_each_step=chance.random() < 0.5,
        has_ledger=chance.random() < 0.5,
        events=tuple(events),
    )


def _possible(wanted: list[Kind], size: int, replaces: bool) -> list[Kind]:
    """What needs more workers than there are comes after a join; joins beyond MOST_WORKERS do not come at all."""
    wanted, possible = list(wanted), list[Kind]()
    while wanted:
        kind = next((kind for kind in wanted if size >= TRAINING[kind]), "join")
        if kind in wanted:
            wanted.remove(kind)
        if kind in ("join", "join, killed"):
            if size == MOST_WORKERS:
                continue
            size += kind == "join" or replaces
        elif kind == "leave" or not replaces:
            size -= TRAINING[kind] - 1
        possible.append(kind)
    return possible
