"""The contract of an engine: one scenario that every engine passes with real processes.

A job starts on some hosts, one worker each. A worker dies; an agent dies; a host dies without a word, where the cluster
can do that; a host is added; one is drained; one gets a notice that it will be taken away; the job ends. Each sample is
trained exactly once per epoch, and nothing is left behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from farandole.testing.proof import Proof
from farandole.testing.running_job import RunningJob, all_training
from tests.support.jobs import ELASTIC_JOB, check_job

SAMPLES = 600
HOSTS = 3
LONG_S = 240.0


class Cluster(Protocol):
    """Hosts of an engine, as the scenario uses them. Their names are those of the job's hosts."""

    program: Sequence[str]
    """The command line up to the flags of `farandole run`, such as sys.executable, "-m", "farandole", "run"."""

    environment: Mapping[str, str] | None
    """The environment of that command; None: that of the tests."""

    def flags(self, hosts: int) -> list[str]:
        """Return the flags for a job with one worker on each of so many hosts."""
        ...

    def add_host(self) -> None:
        """Offer one more host with one slot."""
        ...

    def kill_worker(self, host: str, pid: int) -> None:
        """Kill a worker with SIGKILL; `pid` is its number on its host."""
        ...

    def kill_agent(self, host: str) -> None:
        """Kill the agent of a host with SIGKILL, as the engine itself might."""
        ...

    def cut_off(self, host: str) -> bool:
        """Let a host vanish without a word, for ever. False: this cluster cannot."""
        ...

    def give_notice(self, host: str) -> bool:
        """Announce that the host will be taken away, by the means of the engine. False: it has none."""
        ...

    def control_flags(self) -> list[str]:
        """Return the flags of `farandole drain` that tell which job is meant; none for a job of this machine."""
        ...

    def leftovers(self) -> Sequence[object]:
        """Return what is left of the job's agents and workers."""
        ...


@dataclass
class Figures:
    """What the scenario has measured: milliseconds from a sign to the next applied step, and steps that were redone.

    While a host joins, the others pause until all workers are at a boundary, are connected, have the state and have
    applied a step: `joined_parts_ms`.
    """

    worker_killed_ms: float = 0.0
    agent_killed_ms: float = 0.0
    cut_off_ms: float = 0.0  # with the time for which it had been silent
    joined_ms: float = 0.0
    joined_parts_ms: tuple[tuple[str, float], ...] = ()
    redone_by_drain: int = 0
    redone_by_notice: int = 0


class EngineJob(RunningJob):
    """A job of elastic_job.py that trains until `stop()`."""

    def __init__(self, cluster: Cluster, folder: Path, hosts: int = HOSTS, flags: Sequence[str] = ()) -> None:
        self.output, self.events_file, self._stop = folder / "output", folder / "events", folder / "stop"
        records = folder / "records"
        records.mkdir()
        # Its own folder for the files of running jobs, so that commands find no other job.
        self._environment = {**(cluster.environment or os.environ), "XDG_RUNTIME_DIR": str(folder)}
        self._control_flags = cluster.control_flags
        super().__init__(
            [*cluster.flags(hosts), "--verbose", "--events", str(self.events_file), *flags],
            ELASTIC_JOB,
            ["--epochs", "100000", "--stop", str(self._stop)],
            records,
            self.output,
            program=cluster.program,
            environment=self._environment,
        )

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of a kind so far."""
        lines = self.events_file.read_text().splitlines() if self.events_file.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def train_with(self, workers: int) -> dict[int, dict[str, Any]]:
        """Wait until so many workers train, and no others."""
        return self.wait_until(all_training(workers), LONG_S)

    def drain(self, host: str) -> None:
        """Run `farandole drain HOST`."""
        command = [sys.executable, "-m", "farandole", "drain", host, *self._control_flags()]
        subprocess.run(command, check=True, timeout=LONG_S, env=self._environment)

    def stop(self) -> int:
        """End the training, and return the exit code of the job."""
        self._stop.touch()
        return self.wait(LONG_S)


def hosts_of(job: EngineJob) -> list[str]:
    """Return the hosts of the newest generation's members, by rank."""
    host_of = {event["worker"]: event["host"] for event in job.events("WorkerSpawned")}
    return [host_of[worker] for worker in job.events("GenerationStarted")[-1]["workers"]]


def check_contract(cluster: Cluster, folder: Path) -> Figures:
    """Play the scenario, and return what it has measured."""
    figures = Figures()
    with EngineJob(cluster, folder) as job:
        try:
            _play(cluster, job, figures)
        except BaseException:
            print(job.output.read_text())
            raise
    check_job(Proof(job.folder), SAMPLES)
    assert cluster.leftovers() == []
    return figures


def _play(cluster: Cluster, job: EngineJob, figures: Figures) -> None:
    size = HOSTS
    members = job.train_with(size)
    cluster.kill_worker(hosts_of(job)[1], members[1]["pid"])
    figures.worker_killed_ms = _next_change(job, 0)["total_ms"]
    job.train_with(size)

    changes = _changes(job)
    cluster.kill_agent(hosts_of(job)[1])
    figures.agent_killed_ms = _next_change(job, changes)["total_ms"]
    job.train_with(size)  # the engine has started another agent there

    changes = _changes(job)
    if cluster.cut_off(hosts_of(job)[1]):
        figures.cut_off_ms = _next_change(job, changes)["total_ms"]
        size -= 1
        job.train_with(size)

    changes = _changes(job)
    cluster.add_host()
    size += 1
    job.train_with(size)
    joined = _next_change(job, changes)
    figures.joined_ms = joined["total_ms"]
    figures.joined_parts_ms = tuple(
        (part, joined[f"{part}_ms"]) for part in ("ready", "connected", "synced", "first_step")
    )

    changes = _changes(job)
    job.drain(hosts_of(job)[1])
    size -= 1
    job.train_with(size)
    figures.redone_by_drain = _next_change(job, changes)["steps_redone"]

    changes = _changes(job)
    if cluster.give_notice(hosts_of(job)[1]):
        size -= 1
        job.train_with(size)
        figures.redone_by_notice = _next_change(job, changes)["steps_redone"]
    assert job.stop() == 0


def _changes(job: EngineJob) -> int:
    """Return the number of changes of the membership, once the newest one is complete: its event may come after the
    records of the steps."""
    deadline_s = time.monotonic() + LONG_S
    while True:
        started, found = job.events("GenerationStarted")[-1], job.events("Recovered")
        if started["bootstrap"] or (found and found[-1]["number"] == started["number"]):
            return len(found)
        assert time.monotonic() < deadline_s, "a change of the membership did not come to its end"
        time.sleep(0.01)


def _next_change(job: EngineJob, seen: int) -> dict[str, Any]:
    """Wait for the first change of the membership after `seen` ones, and return its event."""
    deadline_s = time.monotonic() + LONG_S
    while len(found := job.events("Recovered")) <= seen:
        assert time.monotonic() < deadline_s, "nobody has recovered"
        assert job.process.poll() is None, "the job has ended"
        time.sleep(0.01)
    return found[seen]
