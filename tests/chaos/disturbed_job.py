"""A running job to which happens what a schedule says. Used by test_random_schedules.py."""

from __future__ import annotations

import contextlib
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL, SIGTERM

from farandole.testing.proof import Record
from farandole.testing.running_job import RunningJob
from tests.jobs import SCRIPTS
from tests.schedules import TRAINING, Event, Schedule

SCRIPT = SCRIPTS / "scheduled_job.py"
DEADLINE_S = 60.0


class DisturbedJob:
    """Knows whom it has killed or sent away, and how many are to come yet: events wait for those they need.

    staying  workers that there are once everybody has come and gone
    kills    SIGKILLs that were sent
    """

    def __init__(self, schedule: Schedule, folder: Path) -> None:
        self.staying = schedule.size
        self.kills = 0
        self._schedule, self._folder = schedule, folder
        self._chance = random.Random(schedule.seed)
        self._hosts, self._hurry = folder / "hosts", folder / "hurry"
        self._slots = schedule.size
        self._to_come = schedule.size  # workers that are to have trained once everybody has come
        self._gone: set[int] = set()

    def run(self) -> None:
        """To the end of the job. Raises AssertionError when it fails, TimeoutError when something does not come."""
        schedule = self._schedule
        self._offer(schedule.size)
        flags = ["-np", str(schedule.size), "--max-np", "9", "--restarts", "1000" if schedule.replaces else "0"]
        flags += ["--host-discovery-script", f"cat {self._hosts}"]
        flags += ["--sample-ledger", str(self._folder / "ledger")] if schedule.has_ledger else []
        words = ["--hurry", str(self._hurry), "--num-workers", str(schedule.num_workers)]
        words += ["--pace-ms", str(schedule.pace_ms), *["--mean-each-step"] * schedule.mean_each_step]
        with RunningJob(flags, SCRIPT, words, self._folder, self._folder / "output") as self._job:
            for event in schedule.events:
                training = self._wait_for_time_of(event)
                self._do(event, training)
            self._job.wait_until(lambda _: len(self._trained()) >= self._to_come, DEADLINE_S)
            self._hurry.touch()
            assert self._job.wait(DEADLINE_S) == 0, "the job failed"

    # What happens ----------------------------------------------------------------------------------------

    def _wait_for_time_of(self, event: Event) -> list[int]:
        """By rank, the workers that have a state of the job then, and are to keep it."""

        def training(latest: dict[int, Record]) -> list[int]:
            return [record["pid"] for _, record in sorted(latest.items()) if record["pid"] not in self._gone]

        def is_time(latest: dict[int, Record]) -> bool:
            steps = [max(record.get("before", 0), record.get("after", 0)) for record in latest.values()]
            return max(steps, default=0) >= event.step and len(training(latest)) >= TRAINING[event.kind]

        return training(self._job.wait_until(is_time, DEADLINE_S))

    def _do(self, event: Event, training: list[int]) -> None:
        if event.kind in ("kill", "kill two", "leave"):
            first, *others = self._chance.sample(training, TRAINING[event.kind] - 1)
            self._wait_for_a_step(first)
            self._pause(event.pause / 300)
            if event.kind == "leave":
                self._send_away(first)
                return
            self._kill(first)
            for other in others:
                self._pause(event.pause / 20)
                self._kill(other)
        else:
            self._slots += 1
            self._offer(self._slots)
            self.staying += 1
            self._to_come += 1
            if event.kind == "join, killed":
                self._job.wait_until(lambda _: bool(self._starting()), DEADLINE_S)
                newcomer = self._chance.choice(self._starting())
                self._pause(event.pause)
                self._kill(newcomer)

    def _send_away(self, pid: int) -> None:
        self._gone.add(pid)
        self._job.kill(pid, SIGTERM)
        self.staying -= 1

    def _kill(self, pid: int) -> None:
        self._gone.add(pid)
        self._job.kill(pid, SIGKILL)
        self.kills += 1
        self.staying -= not self._schedule.replaces
        self._to_come += self._schedule.replaces - (pid not in self._trained())

    def _offer(self, slots: int) -> None:
        new = self._hosts.with_suffix(".new")
        new.write_text(f"localhost:{slots}\n")
        new.rename(self._hosts)

    # Who is there ----------------------------------------------------------------------------------------

    def _trained(self) -> set[int]:
        """All that have ever begun a step."""
        files = self._folder.glob("worker-*.jsonl")
        return {int(file.stem.split("-")[1]) for file in files if file.stat().st_size > 0}

    def _starting(self) -> list[int]:
        """Workers that have not begun a step yet."""
        return sorted(set(self._workers()) - self._trained() - self._gone)

    def _workers(self) -> Iterator[int]:
        for entry in Path("/proc").iterdir():
            try:
                # Not what the launcher forks and has not become another program yet: there the script comes later.
                words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
                is_worker = words[1:2] == [str(SCRIPT).encode()]
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1] if is_worker else ""
            except OSError:  # it has ended meanwhile
                continue
            if parent == str(self._job.process.pid):
                yield int(entry.name)

    # Waiting ---------------------------------------------------------------------------------------------

    def _wait_for_a_step(self, pid: int) -> None:
        """Until the worker has just written that it begins a step, or has applied one."""
        file = self._folder / f"worker-{pid}.jsonl"
        before, deadline = file.stat().st_size, time.monotonic() + DEADLINE_S
        while file.stat().st_size == before and self._job.process.poll() is None:
            assert time.monotonic() < deadline, f"worker {pid} has done nothing for {DEADLINE_S:g} s"

    def _pause(self, seconds: float) -> None:
        """Unless the job ends first."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._job.wait(seconds)
