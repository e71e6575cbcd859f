"""The job as a whole: its size, its checkpoints, its end, and its connections."""

from __future__ import annotations

from farandole.base.events.event import Event, count, named
from farandole.base.membership import Shortfall


class ScaleChanged(Event):
    """The job has another target size, by a user's request: `old` and `new` workers."""

    old: int
    new: int

    def line(self) -> str:
        return f"the target size of the job changes from {self.old} to {count(self.new, 'worker')}"


class ScaleRefused(Event, level="warning"):
    """A request for `size` workers is outside of the limits `low` and `high`; None: no limit."""

    size: int
    low: int
    high: int | None

    def line(self) -> str:
        limits = f"at least {self.low} (--min-np)"
        if self.high is not None:
            limits += f" and at most {self.high} (--max-np)"
        return f"the requested size of {self.size} workers was refused: the job must have {limits}"


class TrainingFinished(Event):
    """The elastic function has returned on all workers of generation `number`."""

    number: int
    workers: tuple[str, ...]

    def line(self) -> str:
        return f"all {count(len(self.workers), 'worker')} of generation {self.number} have finished training"


class JobBecameStatic(Event, level="warning"):
    """The script does something that cannot follow the membership. All workers have left the elastic function, in the
    middle of the script, and train on as a static job."""

    number: int
    workers: tuple[str, ...]
    reason: str

    def line(self) -> str:
        return (
            f"{self.reason}; this job is static from here on, with {count(len(self.workers), 'worker')}: when a worker "
            f"is lost, the job ends, or starts again as a whole with --max-restarts"
        )


class TrainingCutShort(Event, level="warning"):
    """The elastic function returned before all was done that epochs(total), or a framework's trainer, had promised. The
    script may have intended that (`break`, early stopping) or not: only its author can tell. Fields as in Shortfall
    (membership.py); all are 0 when no worker has returned from the function: what was left is not known then."""

    epochs: int = 0
    epochs_left: int = 0
    steps: int = 0
    steps_left: int = 0

    @classmethod
    def of(cls, left: Shortfall) -> TrainingCutShort:
        return cls(left.epochs, left.epochs_left, left.steps, left.steps_left)

    def line(self) -> str:
        counts = []
        if self.steps:
            counts.append(f"{self.steps_left} of {count(self.steps, 'step')} were not applied")
        if self.epochs:
            counts.append(f"{self.epochs_left} of {count(self.epochs, 'epoch')} ended early or were not started")
        told = "; ".join(counts) or "it has left the elastic function before this returned"
        return f"the script has ended the training itself: {told}"

    def verdict(self) -> str:
        """Return what the last line of the job says of it."""
        if self.steps:
            return f"ended by the script after {self.steps - self.steps_left} of {count(self.steps, 'step')}"
        if not self.epochs:
            return "ended by the script"
        whole = self.epochs - self.epochs_left
        return f"ended by the script after {whole} of {count(self.epochs, 'whole epoch')}"


class JobRemarked(Event, level="warning"):
    """Something that the result of the training needs to be read with: what was skipped, not trained, or not compared.
    It stands in the last line of the job; a later one of the same topic replaces it."""

    sentence = "remark: {text}"
    topic: str
    text: str


class NumberOfWorkersFixed(Event):
    """What a job trains depends on the number of its workers: it waits for the replacement of each lost one."""

    workers: int
    because: str

    def line(self) -> str:
        return f"each step needs {count(self.workers, 'worker')}, so lost ones are waited for: {self.because}"


class NumberOfWorkersFreed(Event, level="warning"):
    """A lost worker of a job with a fixed number of workers cannot be replaced: the job goes on without it."""

    workers: int

    def line(self) -> str:
        return (
            f"there will be no {count(self.workers, 'worker')} again (no restarts, slots or time left to wait for a "
            f"replacement): the job goes on with fewer"
        )


class WorkerTrainsAlone(Event, level="warning"):
    """A worker has made a step of an optimizer, and has not met the others: neither in init(), nor in a process group
    of torch.distributed. They may have trained as many models as there are workers."""

    worker: str
    workers: int

    def line(self) -> str:
        return (
            f"{self.worker} trains alone: it has made an optimizer step and has not met the others of "
            f"{count(self.workers, 'worker')}; call init(), or torch.distributed.init_process_group() as under "
            "torchrun, or start the script with -np 1"
        )


class WorkerMetOthers(Event):
    """A worker of which it was said that it trains alone has met the others: the steps before were its own."""

    sentence = "{worker} has met the other workers now: it does not train alone"
    worker: str


class WorkersNeverMet(Event, level="warning"):
    """Workers have ended with exit code 0 without having called init_process_group(), and others, `waiting`, have
    called it."""

    workers: tuple[str, ...]
    waiting: tuple[str, ...]

    def line(self) -> str:
        ended, waiting = named(self.workers), named(self.waiting)
        return (
            f"ended with exit code 0 without torch.distributed.init_process_group(): {ended}; called it: {waiting}. In "
            "a process group of all workers these wait for the others until its timeout"
        )


class ExitsAwaited(Event, level="warning"):
    """The training is finished for `after_s` seconds, and these workers still run."""

    workers: tuple[str, ...]
    after_s: float

    def line(self) -> str:
        return (
            f"the training was finished {self.after_s:.0f} s ago, and the job waits for the exit of "
            f"{named(self.workers)}: the rest of the script runs, a thread that is no daemon, or a child process that "
            f"it waits for. `farandole stacks --worker {self.workers[0]}` shows what it does"
        )


class CheckpointSaved(Event):
    """A checkpoint was saved: the state after `step` decided steps is in the folder `name`, and `worker` wrote it in
    this time."""

    sentence = "{worker} saved step {step} as {name} in {took_s:.1f} s"
    worker: str
    step: int
    name: str
    took_s: float


class CheckpointFailed(Event, level="warning"):
    """A checkpoint failed. Training continues; earlier checkpoints are untouched, and the next one is tried at its
    time."""

    sentence = "{worker} could not save step {step}: {reason}; earlier checkpoints are untouched"
    worker: str
    step: int
    reason: str


class StateLost(Event, level="warning"):
    """No worker that held the state is left. Newcomers continue from the newest checkpoint, in `run_id`."""

    sentence = "no worker that held the state is left ({reason}); continuing from the newest checkpoint"
    run_id: int
    reason: str


class StopAsked(Event):
    """A signal requested the end of the job. `grace_s`: the time that workers may take."""

    signal: str
    grace_s: float

    def line(self) -> str:
        is_request = self.signal in ("SIGINT", "SIGTERM")
        more = "a second signal" if is_request else "SIGTERM or Ctrl-C twice"
        return (
            f"{self.signal}: the workers are asked to end, and are killed after {self.grace_s:g} s (--grace); "
            f"{more} kills them at once"
        )


class JobEnds(Event):
    """The last event of a job."""

    sentence = "the job ends with exit code {exit_code}: {reason}"
    exit_code: int
    reason: str


class ConnectionRefused(Event, level="warning"):
    """A connection was refused: the peer did not send, or prove, the data that is needed to be served. The job is
    unharmed."""

    sentence = "refused a connection from {who}: {reason}"
    who: str
    reason: str


class JobNotAnnounced(Event, level="warning"):
    """Commands such as `farandole status` will not find the job. It still runs."""

    sentence = "farandole status, scale and drain will not find this job: {reason}"
    reason: str


class CoordinatorStalled(Event, level="warning"):
    """The coordinator could not run for a while; its deadlines are extended by that time."""

    sentence = "the coordinator could not run for {stalled_s:.2f} s; all deadlines are extended by that time"
    stalled_s: float
