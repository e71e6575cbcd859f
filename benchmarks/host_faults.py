"""What happens to a host of three -> next applied step on all survivors, on hosts of a lab. Takes root."""

from __future__ import annotations

import contextlib
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.recovery import WORKLOAD
from farandole.testing.faults.backends import LabBackend, WorkerId
from farandole.testing.faults.fault_plan import ToHost
from farandole.testing.lab import Lab
from farandole.testing.proof import Proof, Record
from farandole.testing.running_job import RunningJob, all_training

HOSTS = 3
_DEADLINE_S = 60.0
_PEACE_S = 1.0  # before each fault: newcomers have started, and the machine does nothing else


def table(times: int, budget_s: float) -> list[dict[str, Any]]:
    """Each fault so many times, at another host each time. Prints a line for each."""
    print(f"\na fault at one of {HOSTS} hosts, detection budget {budget_s:g} s -> next applied step on all survivors")
    print(f"{'fault':<16} {'times':>5} {'median':>8} {'worst':>8}", flush=True)
    with tempfile.TemporaryDirectory(prefix="farandole-bench-") as name:
        folder = Path(name)
        with _job(folder, budget_s) as (job, site):
            done = [(fault, [_bring(job, site, fault, turn, budget_s) for turn in range(times)]) for fault in FAULTS]
        applied = {(host, pid): steps for (host, pid, _), steps in Proof(folder).applied().items()}
    rows = []
    for fault, hits in done:
        found = [hit.recovery_ms(applied) for hit in hits]
        row = {
            "fault": fault,
            "hosts": HOSTS,
            "budget_s": budget_s,
            "ms": [round(ms, 1) for ms in found],
            "median_ms": round(statistics.median(found), 1),
            "worst_ms": round(max(found), 1),
        }
        rows.append(row)
        print(f"{fault:<16} {times:5d} {row['median_ms']:6.0f}ms {row['worst_ms']:6.0f}ms", flush=True)
    return rows


@dataclass(frozen=True)
class Hit:
    """A fault that was brought about, in this generation, at a time of the machine's monotonic clock."""

    at_ns: int
    generation: int
    survivors: frozenset[WorkerId]

    def recovery_ms(self, applied: Mapping[WorkerId, Sequence[Record]]) -> float:
        """Until the slowest survivor has applied a step in a later generation."""
        firsts = []
        for worker in self.survivors:
            later = [record["ns"] for record in applied[worker] if record["generation"] > self.generation]
            firsts.append(min(later))
        return (max(firsts) - self.at_ns) / 1e6


class Site:
    """The hosts of the job, and what can be done to them."""

    def __init__(self, lab: Lab, backend: LabBackend) -> None:
        self.lab, self.backend = lab, backend

    def kill_worker(self, index: int, victim: Record) -> None:
        self.backend.signal((victim["host"], victim["pid"]), signal.SIGKILL)

    def stop_worker(self, index: int, victim: Record) -> None:
        self.backend.signal((victim["host"], victim["pid"]), signal.SIGSTOP)

    def silence(self, index: int, victim: Record) -> None:
        """What it says reaches nobody; what others say reaches it."""
        for other in (self.lab.network.driver, *self.lab.hosts):
            if other is not self.lab.hosts[index]:
                self.lab.network.one_way(self.lab.hosts[index], other)

    def to_host(self, action: Any) -> Callable[[int, Record], None]:
        return lambda index, victim: self.backend.disturb(ToHost(action, index))

    def mend(self, index: int) -> None:
        """The host is there again, with a running agent, whatever became of it."""
        for action in ("thaw", "heal", "boot"):
            if self.lab.hosts[index].is_up or action == "boot":
                self.backend.disturb(ToHost(action, index))  # type: ignore[arg-type]


FAULTS: dict[str, Callable[[Site], Callable[[int, Record], None]]] = {
    "worker killed": lambda site: site.kill_worker,
    "worker stopped": lambda site: site.stop_worker,
    "agent stopped": lambda site: site.to_host("stop agent of"),
    "cable cut": lambda site: site.to_host("cut"),
    "heard by nobody": lambda site: site.silence,
    "powered off": lambda site: site.to_host("power off"),
    "frozen": lambda site: site.to_host("freeze"),
}


@contextlib.contextmanager
def _job(folder: Path, budget_s: float) -> Iterator[tuple[RunningJob, Site]]:
    """One that trains on all hosts, with one worker on each."""
    with Lab(HOSTS) as lab, contextlib.closing(LabBackend(lab, [1] * HOSTS, folder)) as backend:
        flags = ["-np", str(HOSTS), "--restarts", "1000000", "--detection-budget", f"{budget_s:g}", "--quiet"]
        with RunningJob([*flags, *backend.flags], WORKLOAD, [], folder, folder / "output") as job:
            backend.start_agents()
            job.wait_until(all_training(HOSTS), _DEADLINE_S)
            yield job, Site(lab, backend)


def _bring(job: RunningJob, site: Site, fault: str, turn: int, budget_s: float) -> Hit:
    """Returns when the lost worker's replacement trains."""
    time.sleep(_PEACE_S + budget_s)
    latest = job.latest()
    name = site.lab.hosts[turn % HOSTS].name
    victim = next(record for record in latest.values() if record["host"] == name)
    survivors = frozenset((record["host"], record["pid"]) for record in latest.values() if record is not victim)
    hit = Hit(time.monotonic_ns(), victim["generation"], survivors)
    FAULTS[fault](site)(turn % HOSTS, victim)

    def go_on(latest: dict[int, Record]) -> bool:
        """The survivors, without it."""
        workers = {(record["host"], record["pid"]) for record in latest.values()}
        return workers == survivors and all(record["generation"] > hit.generation for record in latest.values())

    def has_come(latest: dict[int, Record]) -> bool:
        return all_training(HOSTS)(latest) and latest[0]["generation"] > hit.generation

    job.wait_until(lambda latest: go_on(latest) or has_come(latest), _DEADLINE_S)
    site.mend(turn % HOSTS)
    job.wait_until(has_come, _DEADLINE_S)
    job.forget(victim)
    return hit
