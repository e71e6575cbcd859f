"""A worker of an unchanged script of torchrun is killed.

Under --in-place the time until all survivors have applied the next step is measured; of a static job, which is
restarted as a whole, the time until all workers of the next attempt have, in turns with torchrun.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.jobs import ROOT, end_all

SCRIPT = Path(__file__).parent / "script_in_place.py"
TIMEOUT_S = 60.0  # for each wait; a restart by torchrun takes 3 to 8 s on two busy cores
_STOP_S = 20.0
_MOST_HANGS = 2  # of a launcher, which is not tried again then
_FIRST_STEPS = 20  # of each worker, before it is disturbed

Line = dict[str, Any]
Steps = dict[int, list[Line]]

LAUNCHERS: dict[str, Callable[[int, int], list[str]]] = {
    "farandole": lambda workers, restarts: ["-m", "farandole", "torchrun", *_torchruns_flags(workers, restarts)],
    "torchrun": lambda workers, restarts: ["-m", "torch.distributed.run", *_torchruns_flags(workers, restarts)],
}


def _torchruns_flags(workers: int, restarts: int) -> list[str]:
    return ["--standalone", "--nproc-per-node", str(workers), "--max-restarts", str(restarts)]


class Job:
    """A job of the script, which ends with the `with` block."""

    def __init__(self, launcher: Sequence[str], folder: Path) -> None:
        self.folder = folder
        command = [sys.executable, *launcher, str(SCRIPT), "--records", str(folder)]
        path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        with (folder / "output").open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        end_all(self._process, self.folder)  # also workers that hang before their first step

    def steps(self) -> Steps:
        """Return the complete lines of each process."""
        return {
            int(path.stem.removeprefix("steps-")): [
                json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")
            ]
            for path in self.folder.glob("steps-*.jsonl")
        }

    def wait_until(self, is_so: Callable[[Steps], bool]) -> Steps:
        """Raise TimeoutError with the output of the job when it takes too long, RuntimeError when the job ends."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not is_so(steps := self.steps()):
            if self._process.poll() is not None:
                raise RuntimeError((self.folder / "output").read_text())
            if time.monotonic() > deadline_s:
                raise TimeoutError((self.folder / "output").read_text())
            time.sleep(0.02)
        return steps


def recovery(workers: int, kills: int, seed: int) -> Line:
    """Kill a random worker `kills` times under --in-place, each time when the last one's replacement has joined.

    Milliseconds, from the kill until the slowest survivor has applied a step among the workers that are left.
    """
    chance, done, alive = random.Random(seed), [], set[int]()
    with tempfile.TemporaryDirectory(prefix="farandole-bench-") as name:
        events = Path(name) / "events.jsonl"
        flags = ["-np", str(workers), "--restarts", str(kills), "--in-place", "--events", str(events)]
        with Job(["-m", "farandole", "run", *flags, sys.executable], Path(name)) as job:
            lost = set[int]()

            def are_complete(steps: Steps) -> bool:
                there = [lines[-_FIRST_STEPS:] for pid, lines in steps.items() if pid not in lost]
                return len(there) == workers and all(
                    len(lines) == _FIRST_STEPS and all(line["size"] == workers for line in lines) for lines in there
                )

            for _ in range(kills):
                alive = {pid for pid in job.wait_until(are_complete) if pid not in lost}
                victim = chance.choice(sorted(alive))
                lost.add(victim)
                done.append((time.monotonic_ns(), alive - lost))
                os.kill(victim, signal.SIGKILL)
            steps = job.wait_until(are_complete)
            told = [json.loads(line) for line in events.read_text().splitlines()]
    recovered = []
    for at_ns, survivors in done:
        first = [_first_after(steps[pid], at_ns, size=workers - 1) for pid in survivors]
        recovered.append((max(first) - at_ns) / 1e6)
    gaps = [(b["ns"] - a["ns"]) / 1e6 for pid in alive for a, b in zip(steps[pid], steps[pid][1:], strict=False)]
    reports = [each for each in told if each["event"] == "Recovered" and each["lost"]]
    phases = ("total_ms", "ready_ms", "connected_ms", "synced_ms", "first_step_ms")
    return {
        "workers": workers,
        "kills": kills,
        "seed": seed,
        "median_step_ms": round(statistics.median(gaps), 2),
        "recovery_ms": [round(ms, 1) for ms in recovered],
        "recovery_median_ms": round(statistics.median(recovered), 1),
        "recovery_worst_ms": round(max(recovered), 1),
        "phases_median_ms": {name: round(statistics.median(each[name] for each in reports), 1) for name in phases},
    }


def _first_after(lines: Sequence[Line], at_ns: int, **same: int) -> int:
    """Return the time of the first step after a moment with these values."""
    return min(
        line["ns"] for line in lines if line["ns"] > at_ns and all(line[name] == value for name, value in same.items())
    )


def restart(launcher: str, workers: int) -> float:
    """Kill one worker of a static job; return the seconds until all workers of the next attempt have applied a
    step."""
    with tempfile.TemporaryDirectory(prefix="farandole-bench-") as name:
        with Job(LAUNCHERS[launcher](workers, 1), Path(name)) as job:

            def have_stepped(attempt: int, most: int) -> Callable[[Steps], bool]:
                def condition(steps: Steps) -> bool:
                    of_attempt = [lines for lines in steps.values() if lines and lines[0]["attempt"] == attempt]
                    return len([lines for lines in of_attempt if len(lines) >= most]) == workers

                return condition

            first = job.wait_until(have_stepped(0, _FIRST_STEPS))
            at_ns = time.monotonic_ns()
            os.kill(max(first), signal.SIGKILL)
            steps = job.wait_until(have_stepped(1, 1))
        new = [lines for pid, lines in steps.items() if pid not in first]
        return (max(_first_after(lines, at_ns, attempt=1) for lines in new) - at_ns) / 1e9


def recovery_table(kills: int, seed: int) -> list[Line]:
    """Measure the recovery under --in-place with 2 and 3 workers, and print it."""
    print("\nunchanged script, --in-place: kill -9 of one worker -> next applied step on all survivors")
    rows = []
    for workers in (2, 3):
        row = recovery(workers, kills, seed)
        rows.append(row)
        print(
            f"{workers:7d} workers, step {row['median_step_ms']:5.1f} ms: {row['recovery_median_ms']:6.0f} ms median, "
            f"{row['recovery_worst_ms']:6.0f} ms worst of {kills}; by the coordinator {row['phases_median_ms']}",
            flush=True,
        )
    return rows


def restart_table(turns: int, workers: int = 2) -> list[Line]:
    """Measure the restart of a static job as a whole, in turns with torchrun, and print it."""
    print("\nunchanged script, static: kill -9 of one worker -> first step of all workers of the next attempt")
    seconds: dict[str, list[float]] = {name: [] for name in LAUNCHERS}
    failures, hangs = dict.fromkeys(LAUNCHERS, 0), dict.fromkeys(LAUNCHERS, 0)
    for turn in range(turns):
        for name in sorted(LAUNCHERS, reverse=bool(turn % 2)):
            if hangs[name] == _MOST_HANGS:
                continue
            try:
                seconds[name].append(restart(name, workers))
                print(f"  turn {turn + 1} of {turns}: {name} {seconds[name][-1]:.2f} s", flush=True)
            except (
                RuntimeError,
                TimeoutError,
            ) as error:  # Gloo connects to former addresses, or gives up
                failures[name] += 1
                hangs[name] += isinstance(error, TimeoutError)
                what = "hung" if isinstance(error, TimeoutError) else "ended"
                print(f"  turn {turn + 1} of {turns}: {name} did not train again: it {what}", flush=True)
    rows = []
    for name, measured in seconds.items():
        if not measured:
            print(f"{name:>10}: none of {failures[name]} restarts succeeded", flush=True)
            continue
        rows.append(
            {
                "launcher": name,
                "workers": workers,
                "failures": failures[name],
                "seconds": [round(each, 3) for each in measured],
                "median_s": round(statistics.median(measured), 3),
                "best_s": round(min(measured), 3),
                "worst_s": round(max(measured), 3),
            }
        )
        print(
            f"{name:>10}: {rows[-1]['median_s']:.2f} s median of {len(measured)}, worst {rows[-1]['worst_s']:.2f} s",
            flush=True,
        )
    return rows
