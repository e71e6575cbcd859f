"""Events of workers, from their start to their end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from farandole.events.base import Event, Level, count


@dataclass(frozen=True)
class WorkerSpawned(Event):
    """A worker was started. `restart` is 0 for the first worker of a slot."""

    worker: str
    slot: int
    host: str
    restart: int
    restarts: int

    def line(self) -> str:
        again = f", restart {self.restart} of {self.restarts}" if self.restart else ""
        return f"starting {self.worker} in slot {self.slot} on {self.host}{again}"


@dataclass(frozen=True)
class ForkServerReady(Event):
    """The fork server is ready: workers are forked by this process from now on."""

    pid: int

    def line(self) -> str:
        return f"the fork server (process {self.pid}) is ready"


@dataclass(frozen=True)
class ForkServerLost(Event):
    """The fork server was lost: workers are started in the plain way until there is another one."""

    reason: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"the fork server is lost ({self.reason}); workers are started without it"


@dataclass(frozen=True)
class SpareWaits(Event):
    """A worker waits at its elastic function, and is admitted when a member is lost."""

    worker: str
    slot: int
    host: str

    def line(self) -> str:
        return f"{self.worker} (slot {self.slot}) waits as a spare on {self.host}"


@dataclass(frozen=True)
class SparesMissing(Event):
    """The job has no slots for some of the requested spares."""

    spares: int
    missing: int
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        spares = f"{count(self.spares, 'spare')} (--spares)"
        return f"{self.missing} of {spares} cannot be started: the hosts have no more slots"


@dataclass(frozen=True)
class SlotsMissing(Event):
    """The hosts have fewer slots than the job wants workers. `ends_in_s`: time until the start is abandoned; None once
    there is a generation, whose workers continue."""

    missing: int
    wanted: int
    ends_in_s: float | None
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        there = self.wanted - self.missing
        text = f"waiting for {count(self.missing, 'more slot')} ({there} of {self.wanted} are available)"
        return text if self.ends_in_s is None else f"{text}; the job ends in {self.ends_in_s:.0f} s (--start-timeout)"


@dataclass(frozen=True)
class SlotBackoff(Event):
    """A slot's workers fail repeatedly: `failures` in a row failed soon after their start, so no other one is started
    there for `pause_s`."""

    slot: int
    host: str
    failures: int
    pause_s: float
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return (
            f"slot {self.slot} on {self.host} is in backoff for {self.pause_s:g} s: {self.failures} workers in a row "
            "failed there soon after their start"
        )


@dataclass(frozen=True)
class WorkerLost(Event):
    """A worker was lost. `last_lines` is the end of its stderr, as far as its agent had it. `restarts_left` of its
    slot; None where no budget counts, because a lost worker costs its host."""

    worker: str
    slot: int
    how: str
    restarts_left: int | None
    last_lines: tuple[str, ...] = ()
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        left = "" if self.restarts_left is None else f"; {count(self.restarts_left, 'restart')} left for its slot"
        return f"lost {self.worker} (slot {self.slot}): it {self.how}{left}"


@dataclass(frozen=True)
class WorkerEnded(Event):
    """The end of a worker that the job does not need any more: it finished, or it left, or it was not needed."""

    worker: str
    slot: int
    how: str

    def line(self) -> str:
        return f"{self.worker} (slot {self.slot}) {self.how}"


@dataclass(frozen=True)
class WorkerLeaves(Event):
    worker: str
    slot: int

    def line(self) -> str:
        return f"{self.worker} (slot {self.slot}) was asked to leave and does so at the next boundary"


@dataclass(frozen=True)
class UserCodeFailed(Event):
    worker: str
    summary: str
    traceback: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"{self.worker} raised {self.summary}\n{self.traceback}".rstrip()


@dataclass(frozen=True)
class StallNoticed(Event):
    """No member has made progress for long, and there is no step timeout: the stall is only reported."""

    step: int
    in_own_code: tuple[str, ...]
    waiting: tuple[str, ...]
    stalled_s: float
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        hung = f"{', '.join(self.in_own_code)} in their own code" if self.in_own_code else "no worker in its own code"
        return (
            f"no step for {self.stalled_s:.0f} s after step {self.step}: {hung}, {', '.join(self.waiting)} waiting; "
            "--step-timeout S stops workers that block the others for S seconds"
        )


@dataclass(frozen=True)
class WorkersHung(Event):
    """Workers hang: they have made no progress since `step` while all others wait for them; they are stopped."""

    step: int
    workers: tuple[str, ...]
    stalled_s: float
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        who = ", ".join(self.workers)
        return (
            f"stopping {who}: all other workers waited at step {self.step} for {self.stalled_s:.0f} s (--step-timeout)"
        )


@dataclass(frozen=True)
class WorkerStacks(Event):
    """The stacks of the threads of a worker that was stopped for making no progress."""

    worker: str
    stacks: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"the threads of {self.worker} when it was stopped:\n{_main_first(self.stacks)}".rstrip()


def _main_first(stacks: str) -> str:
    """Move the main thread to the front, since readers look for the script first. faulthandler writes the newest thread
    first, and so the main thread last."""
    *others, main = stacks.rstrip().split("\n\n")
    _, *frames = main.split("\n")
    return "\n\n".join(["\n".join(["The main thread (most recent call first):", *frames]), *others])


@dataclass(frozen=True)
class CollectiveStalled(Event):
    """All members wait for each other since `step`: a connection between them is broken, or they run different code."""

    step: int
    workers: tuple[str, ...]
    stalled_s: float
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return (
            f"all {count(len(self.workers), 'worker')} have waited for each other at step {self.step} for "
            f"{self.stalled_s:.0f} s (--step-timeout)"
        )


@dataclass(frozen=True)
class StatesDiverged(Event):
    """States differ: these workers had another state than `source` after `step` steps. `name`: the first parameter,
    buffer or other tensor that differed, of `objects`. They have copied the state of `source`, or the job ends."""

    step: int
    name: str
    objects: int
    workers: tuple[str, ...]
    source: str
    is_fatal: bool
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        more = f" and {count(self.objects - 1, 'more tensor')}" if self.objects > 1 else ""
        who = ", ".join(self.workers)
        done = "the job ends" if self.is_fatal else f"{who} copied the state of {self.source}"
        return f"the states of workers differed at step {self.step}: {self.name}{more} of {who}; {done}"


@dataclass(frozen=True)
class StoppedWorkerKilled(Event):
    """A worker was stopped (SIGSTOP) for longer than the detection budget, and was killed because of it."""

    worker: str
    budget_s: float
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"{self.worker} was stopped by a signal for {self.budget_s:g} s; it is killed"
