"""A soak run: a random worker is killed again and again, each is replaced. `make soak MINUTES=5 EVERY=15`.

What is measured: samples per second in applied steps, as a part of what the workers that were there could have done
without faults; and the longest time in which a worker applied no step. Jobs left in peace, with as many workers as
there were in the soak run, are measured in the same run: one before it and the others after it. What is checked: each
sample once in each epoch, each step with its samples, equal parameters. A line is appended to a file for each soak run.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.soak_job import BATCH, SAMPLES, SEED
from farandole import __version__
from farandole.testing.proof import Proof, Record
from farandole.testing.running_job import RunningJob, all_training
from tests.support.pure_order import global_batches

SCRIPT = Path(__file__).parent / "soak_job.py"
RESULTS = Path(__file__).parent / "results" / "soak.jsonl"
STALL_S = 10.0
_DEADLINE_S = 120.0
_POLL_S = 0.01
_RARE = 0.005  # of the time: so many workers need no measurement of their own


@dataclasses.dataclass(frozen=True)
class Soak:
    """What became of it. Times on the machine's monotonic clock, in nanoseconds.

    kills         when, and in which generation the victim was
    began, ended  what is between is measured
    """

    proof: Proof
    kills: list[tuple[int, int]]
    began: int
    ended: int
    output: str


def main() -> int:
    options = _parse()
    peace = {options.workers: [rate_in_peace(options.workers, options.peace_s)]}
    soak = run_soak(options)
    present = presence(soak)
    total_s = sum(present.values())
    for workers, seconds in sorted(present.items()):
        if workers == options.workers or seconds > _RARE * total_s:
            peace.setdefault(workers, []).append(rate_in_peace(workers, options.peace_s))
    rates = {workers: sum(each) / len(each) for workers, each in peace.items()}
    possible = sum(seconds * _rate(rates, workers) for workers, seconds in present.items())
    applied = BATCH * len({r["after"] for r in soak.proof.records if "after" in r and _is_within(r, soak)})
    wrong = violations(soak)
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "cores": os.cpu_count(),
        "seed": options.seed,
        "workers": options.workers,
        "flags": options.flag,
        "sample_ms": options.sample_ms,
        "every_s": options.every,
        "minutes": round(total_s / 60, 2),
        "kills": len(soak.kills),
        "applied_per_s": round(applied / total_s, 1),
        "possible_per_s": round(possible / total_s, 1),
        "ratio": round(applied / possible, 4),
        "in_peace_per_s": {workers: [round(each, 1) for each in found] for workers, found in peace.items()},
        "present_s": {workers: round(seconds, 1) for workers, seconds in sorted(present.items())},
        "longest_stall_s": round(longest_stall_s(soak.proof), 3),
        "steps": soak.proof.steps(),
        "steps_redone": soak.proof.redone(),
        "violations": wrong,
    }
    print(json.dumps(result, indent=1))
    with options.results.open("a") as file:
        file.write(json.dumps(result) + "\n")
    return 1 if wrong else 0


def run_soak(options: argparse.Namespace) -> Soak:
    """Kill a worker every now and then. One that is due while fewer than two train waits for that."""
    chance, kills = random.Random(options.seed), list[tuple[int, int]]()
    with tempfile.TemporaryDirectory(prefix="farandole-soak-") as name:
        folder, stop = Path(name), Path(name) / "stop"
        flags = ["-np", str(options.workers), "--restarts", "1000000", "--quiet", *options.flag]
        words = ["--stop", str(stop), "--sample-ms", str(options.sample_ms)]
        with RunningJob(flags, SCRIPT, words, folder, folder / "output") as job:
            job.wait_until(all_training(options.workers), _DEADLINE_S)
            began = time.monotonic_ns()
            until = began + int(60e9 * options.minutes)
            due = began + int(1e9 * options.every)
            while due < until:
                _sleep_until(due)
                latest = job.wait_until(_can_lose_one, _DEADLINE_S)
                victim = latest[chance.choice(sorted(latest))]
                kills.append((job.kill(victim["pid"]), victim["generation"]))
                job.forget(victim)
                due += int(1e9 * options.every * chance.uniform(0.8, 1.2))
            _sleep_until(until)
            job.wait_until(all_training(options.workers), _DEADLINE_S)  # none of the replacements was lost
            ended = time.monotonic_ns()
            stop.touch()
            code = job.wait(_DEADLINE_S)
        output = (folder / "output").read_text(errors="replace")
        if code:
            raise RuntimeError(f"the job ended with exit code {code}:\n{output[-3000:]}")
        return Soak(Proof(folder), kills, began, ended, output)


def rate_in_peace(workers: int, seconds: float) -> float:
    """Samples per second of a job to which nothing happens."""
    with tempfile.TemporaryDirectory(prefix="farandole-soak-") as name:
        folder, stop = Path(name), Path(name) / "stop"
        flags = ["-np", str(workers), "--restarts", "0", "--quiet"]
        with RunningJob(flags, SCRIPT, ["--stop", str(stop)], folder, folder / "output") as job:
            job.wait_until(all_training(workers), _DEADLINE_S)
            began = time.monotonic_ns()
            _sleep_until(began + int(1e9 * seconds))
            ended = time.monotonic_ns()
            stop.touch()
            if job.wait(_DEADLINE_S):
                raise RuntimeError((folder / "output").read_text(errors="replace")[-3000:])
        times = [r["ns"] for r in Proof(folder).records if "after" in r and r["rank"] == 0 and began <= r["ns"] < ended]
        return BATCH * (len(times) - 1) / ((max(times) - min(times)) / 1e9)


def presence(soak: Soak) -> dict[int, float]:
    """For how many seconds of the soak run how many workers were there: from a kill until the next generation there is
    one less, and a newcomer is there once its generation has applied a step."""
    sizes, first = soak.proof.generations(), dict[int, int]()
    for record in soak.proof.records:
        if "after" in record:
            first[record["generation"]] = min(record["ns"], first.get(record["generation"], record["ns"]))
    changes = [(at, 0, number) for number, at in first.items()] + [(at, 1, number) for at, number in soak.kills]
    found: dict[int, float] = defaultdict(float)
    workers, generation, since = 0, 0, soak.began
    for at, is_kill, number in sorted(changes):
        at = min(max(at, soak.began), soak.ended)
        found[workers] += (at - since) / 1e9
        since = at
        if not is_kill:
            workers, generation = sizes[number], number
        elif number == generation:  # else the victim was a newcomer whose generation had applied nothing yet
            workers -= 1
    found[workers] += (soak.ended - since) / 1e9
    return {workers: seconds for workers, seconds in found.items() if seconds}


def longest_stall_s(proof: Proof) -> float:
    """Of a worker that trained before and after it."""
    gaps = (b["ns"] - a["ns"] for steps in proof.applied().values() for a, b in itertools.pairwise(steps))
    return max(gaps) / 1e9


def violations(soak: Soak) -> list[str]:
    """Of what a job promises."""
    proof, found = soak.proof, []
    epochs = proof.epochs(SAMPLES)
    if not epochs.is_exact:
        found.append(f"samples lost {epochs.lost}, repeated {epochs.repeated}")
    expected, trained = global_batches(SAMPLES, BATCH, SEED, epochs.complete), proof.samples_by_step()
    if expected != trained:
        different = [step for step in expected.keys() | trained.keys() if expected.get(step) != trained.get(step)]
        found.append(f"steps that did not train the samples of a job in peace: {sorted(different)[:10]}")
    if len({end["parameters"] for end in proof.ends()}) != 1:
        found.append("workers ended with different parameters")
    if proof.redone() > len(soak.kills):
        found.append(f"{proof.redone()} steps were done again, after {len(soak.kills)} kills")
    stall_s = longest_stall_s(proof)
    if stall_s > STALL_S:
        found.append(f"a worker applied no step for {stall_s:.1f} s")
    return found


def _rate(rates: dict[int, float], workers: int) -> float:
    """Of a number of workers that was not measured: in proportion to the nearest."""
    if workers in rates:
        return rates[workers]
    nearest = min(rates, key=lambda each: abs(each - workers))
    return rates[nearest] * workers / nearest


def _can_lose_one(latest: dict[int, Record]) -> bool:
    """Somebody else has the state."""
    return len(latest) >= 2 and all("after" in record or "before" in record for record in latest.values())


def _is_within(record: Record, soak: Soak) -> bool:
    return soak.began <= int(record["ns"]) < soak.ended


def _sleep_until(ns: int) -> None:
    while (left := ns - time.monotonic_ns()) > 0:
        time.sleep(min(left / 1e9, 1.0))


def _parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two kills, on average")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--flag", action="append", default=[], help="of farandole run, as in --flag=--spares=1")
    parser.add_argument("--sample-ms", type=float, default=0.5, help="what each takes beside the processor's work")
    parser.add_argument("--peace-s", type=float, default=15.0, help="how long each job in peace is measured")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS, help="a file that is appended to")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
