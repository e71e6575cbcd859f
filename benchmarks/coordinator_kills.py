"""The coordinator is killed again and again while workers train: what their steps notice of it.

python -m benchmarks.coordinator_kills [--kills 20] [--workers 2] [--worker-kills 5]

`kill -9` of the coordinator at moments in which nothing else happens. Compared are the times between two applied steps
of a worker in the second around each kill, in the second around moments of peace, and in the second around the start of
a Python process that imports what a coordinator imports, and does nothing: where workers use all cores, its start takes
time from them, and so would that of a coordinator that is not forked. Checked: no step is repeated or lost, no worker
ends, no generation begins.

Then a worker is killed while there is no coordinator, again and again: from the return of the coordinator to the first
step that all survivors have applied together.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.recovery import WORKLOAD
from farandole.testing.proof import Proof
from farandole.testing.running_job import RunningJob, all_training, coordinator_below

_SAMPLES = 4096  # of the workload
_DEADLINE_S = 60.0
_AROUND_S = 0.5  # before and after a moment
_BETWEEN_S = 1.5
_PARTS = ("kill", "peace", "other process")


class Watched:
    """A job whose coordinator is killed. `folder` is that of its records."""

    def __init__(self, job: RunningJob, events: Path) -> None:
        self.job, self._events = job, events

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of one kind. The last line may not be complete yet."""
        lines = self._events.read_bytes().split(b"\n")[:-1]
        return [each for each in map(json.loads, lines) if each["event"] == kind]

    def coordinator(self) -> int:
        """Return the process of the coordinator, without a question to it: that would be a disturbance, too."""
        pid = coordinator_below(self.job.process.pid)
        if pid is None:
            raise RuntimeError(f"process {self.job.process.pid} has no coordinator")
        return pid

    def kill_coordinator(self, then: Callable[[], None] = lambda: None) -> tuple[float, float]:
        """Kill it, do something `then`, and return when it was killed and when the next one had the agent back."""
        before, pid = len(self.events("CoordinatorBack")), self.coordinator()
        killed_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        then()
        until_s = killed_s + _DEADLINE_S
        while len(back := self.events("CoordinatorBack")) == before:
            if time.monotonic() > until_s:
                raise TimeoutError(f"no other coordinator came within {_DEADLINE_S:g} s")
            time.sleep(0.005)
        return killed_s, back[before]["clock_s"]


def measure_steps(workers: int, kills: int) -> dict[str, Any]:
    """Kill the coordinator `kills` times; return the milliseconds of steps around the moments of each part."""
    with tempfile.TemporaryDirectory(prefix="farandole-bench-") as name:
        folder = Path(name)
        moments: dict[str, list[float]] = {part: [] for part in _PARTS}
        away_ms = []
        with RunningJob(*_job(workers, 0, folder)) as job:
            watched = Watched(job, folder / "events.jsonl")
            first = job.wait_until(all_training(workers), _DEADLINE_S)
            time.sleep(_BETWEEN_S)
            for _ in range(kills):
                killed_s, back_s = watched.kill_coordinator()
                moments["kill"].append(killed_s)
                away_ms.append((back_s - killed_s) * 1e3)
                time.sleep(_BETWEEN_S)
                moments["peace"].append(time.monotonic())
                time.sleep(_BETWEEN_S)
                moments["other process"].append(time.monotonic())
                subprocess.run([sys.executable, "-c", "import farandole.job.coordinator.server"], check=True)
                time.sleep(_BETWEEN_S)
            last = job.wait_until(all_training(workers), _DEADLINE_S)
            generations = watched.events("GenerationStarted")
        proof = Proof(folder)
        assert len(generations) == 1, generations
        assert {each["pid"] for each in last.values()} == {each["pid"] for each in first.values()}
        assert proof.redone() == 0
        assert not proof.epochs(_SAMPLES).repeated
        return {
            "workers": workers,
            "kills": kills,
            "steps": proof.steps(),
            "steps_redone": proof.redone(),
            "workers_restarted": 0,
            "away_median_ms": round(statistics.median(away_ms)),
            "away_worst_ms": round(max(away_ms)),
            "step_ms": {part: _steps_around(proof, moments[part]) for part in _PARTS},
        }


def measure_worker_kills(workers: int, kills: int, seed: int) -> dict[str, Any]:
    """Kill a worker right after the coordinator, `kills` times."""
    chance, handled_ms = random.Random(seed), list[float]()
    with tempfile.TemporaryDirectory(prefix="farandole-bench-") as name:
        folder = Path(name)
        with RunningJob(*_job(workers, kills, folder)) as job:
            watched = Watched(job, folder / "events.jsonl")
            latest = job.wait_until(all_training(workers), _DEADLINE_S)
            for _ in range(kills):
                victim = latest[chance.randrange(workers)]
                survivors = {each["pid"] for each in latest.values()} - {victim["pid"]}
                beyond = victim["generation"]

                def kill(pid: int = victim["pid"]) -> None:
                    job.kill(pid)

                _, back_s = watched.kill_coordinator(then=kill)
                job.forget(victim)
                latest = job.wait_until(_joined(workers, beyond), _DEADLINE_S)
                applied = Proof(folder).first_steps(beyond + 1, survivors)
                assert set(applied) == survivors
                handled_ms.append(max(applied.values()) / 1e6 - back_s * 1e3)
    return {
        "workers": workers,
        "kills": kills,
        "handled_median_ms": round(statistics.median(handled_ms)),
        "handled_worst_ms": round(max(handled_ms)),
    }


def _job(workers: int, restarts: int, folder: Path) -> tuple[list[str], Path, list[str], Path, Path]:
    flags = ["-np", str(workers), "--restarts", str(restarts), "--quiet", "--events", str(folder / "events.jsonl")]
    return flags, WORKLOAD, [], folder, folder / "output"


def _joined(workers: int, beyond: int) -> Callable[[dict[int, dict[str, Any]]], bool]:
    return lambda latest: all_training(workers)(latest) and latest[0]["generation"] > beyond


def _steps_around(proof: Proof, moments: list[float]) -> dict[str, float]:
    """Return the median and the worst of the steps within the second around each of these moments, and the median of
    the worst ones of each moment."""
    worst, steps = [], list[float]()
    for moment_s in moments:
        begin_ns, end_ns = (moment_s - _AROUND_S) * 1e9, (moment_s + _AROUND_S) * 1e9
        around = [
            (after["ns"] - before["ns"]) / 1e6
            for applied in proof.applied().values()
            for before, after in itertools.pairwise(applied)
            if after["ns"] >= begin_ns and before["ns"] <= end_ns
        ]
        steps += around
        worst.append(max(around))
    return {
        "median": round(statistics.median(steps), 2),
        "worst_of_a_second_median": round(statistics.median(worst), 1),
        "worst": round(max(worst), 1),
    }


def main() -> None:
    """Measure, and print one line of JSON for each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kills", type=int, default=20, help="of the coordinator alone")
    parser.add_argument("--worker-kills", type=int, default=5, help="of a worker together with the coordinator")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.kills:
        print(json.dumps(measure_steps(options.workers, options.kills), indent=1))
    if options.worker_kills:
        print(json.dumps(measure_worker_kills(options.workers, options.worker_kills, options.seed), indent=1))


if __name__ == "__main__":
    main()
