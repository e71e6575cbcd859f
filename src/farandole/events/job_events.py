"""Events of the job as a whole: its size, its checkpoints, its end, and its connections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from farandole.events.base import Event, Level, count
from farandole.membership import Shortfall


@dataclass(frozen=True)
class ScaleChanged(Event):
    old: int
    new: int

    def line(self) -> str:
        return f"the target size of the job changes from {self.old} to {count(self.new, 'worker')}"


@dataclass(frozen=True)
class ScaleRefused(Event):
    size: int
    low: int
    high: int | None
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        limits = f"at least {self.low} (--min-np)"
        if self.high is not None:
            limits += f" and at most {self.high} (--max-np)"
        return f"the requested size of {self.size} workers was refused: the job must have {limits}"


@dataclass(frozen=True)
class TrainingFinished(Event):
    number: int
    workers: tuple[str, ...]

    def line(self) -> str:
        return f"all {count(len(self.workers), 'worker')} of generation {self.number} have finished training"


@dataclass(frozen=True)
class TrainingCutShort(Event):
    """The elastic function returned before all was done that epochs(total), or a framework's trainer, had promised.

    The script may have intended that (`break`, early stopping) or not: only its author can tell. Fields as in Shortfall
    (membership.py).
    """

    epochs: int
    epochs_left: int
    steps: int
    steps_left: int
    level: ClassVar[Level] = "warning"

    @classmethod
    def of(cls, left: Shortfall) -> TrainingCutShort:
        return cls(left.epochs, left.epochs_left, left.steps, left.steps_left)

    def line(self) -> str:
        counts = []
        if self.steps:
            counts.append(f"{self.steps_left} of {count(self.steps, 'step')} were not applied")
        if self.epochs:
            counts.append(f"{self.epochs_left} of {count(self.epochs, 'epoch')} ended early or were not started")
        return f"training ended earlier than planned: {'; '.join(counts)}"


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A checkpoint was saved: the state after `step` decided steps is in the folder `name`, and `worker` wrote it in
    this time."""

    worker: str
    step: int
    name: str
    took_s: float

    def line(self) -> str:
        return f"{self.worker} saved step {self.step} as {self.name} in {self.took_s:.1f} s"


@dataclass(frozen=True)
class CheckpointFailed(Event):
    """A checkpoint failed. Training continues; earlier checkpoints are untouched, and the next one is tried at its
    time."""

    worker: str
    step: int
    reason: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"{self.worker} could not save step {self.step}: {self.reason}; earlier checkpoints are untouched"


@dataclass(frozen=True)
class StateLost(Event):
    """No worker that held the state is left. Newcomers continue from the newest checkpoint, in `run_id`."""

    run_id: int
    reason: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"no worker that held the state is left ({self.reason}); continuing from the newest checkpoint"


@dataclass(frozen=True)
class StopAsked(Event):
    """A signal requested the end of the job. `grace_s`: the time that workers may take."""

    signal: str
    grace_s: float

    def line(self) -> str:
        more = "SIGTERM or Ctrl-C twice" if self.signal == "SIGHUP" else "a second signal"
        return (
            f"{self.signal}: the workers are asked to end, and are killed after {self.grace_s:g} s (--grace); "
            f"{more} kills them at once"
        )


@dataclass(frozen=True)
class JobEnds(Event):
    exit_code: int
    reason: str

    def line(self) -> str:
        return f"the job ends with exit code {self.exit_code}: {self.reason}"


@dataclass(frozen=True)
class ConnectionRefused(Event):
    """A connection was refused: the peer did not send, or prove, the data that is needed to be served. The job is
    unharmed."""

    who: str
    reason: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"refused a connection from {self.who}: {self.reason}"


@dataclass(frozen=True)
class JobNotAnnounced(Event):
    """Commands such as `farandole status` will not find the job. It still runs."""

    reason: str
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"farandole status, scale and drain will not find this job: {self.reason}"


@dataclass(frozen=True)
class CoordinatorStalled(Event):
    """The coordinator could not run for a while; its deadlines are extended by that time."""

    stalled_s: float
    level: ClassVar[Level] = "warning"

    def line(self) -> str:
        return f"the coordinator could not run for {self.stalled_s:.2f} s; all deadlines are extended by that time"
