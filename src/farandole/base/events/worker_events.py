"""Workers, from their start to their end."""

from __future__ import annotations

from farandole.base.events.event import Event, count, named


class WorkerSpawned(Event):
    """A worker was started. `restart` is 0 for the first worker of a slot, `rank` and `local_rank` the ranks that it
    will most likely get, `attempt` how often all workers have been started again."""

    worker: str
    slot: int
    host: str
    restart: int
    restarts: int
    rank: int | None = None
    local_rank: int | None = None
    attempt: int = 0

    def line(self) -> str:
        again = f", restart {self.restart} of {self.restarts}" if self.restart else ""
        again += f", attempt {self.attempt + 1}" if self.attempt else ""
        return f"starting {self.worker} in slot {self.slot} on {self.host}{again}"


class ForkServerReady(Event):
    """The fork server is ready: workers are forked by this process from now on."""

    sentence = "the fork server (process {pid}) is ready"
    pid: int


class ForkServerLost(Event, level="warning"):
    """The fork server was lost: workers are started in the plain way until there is another one."""

    sentence = "the fork server is lost ({reason}); workers are started without it"
    reason: str


class SpareWaits(Event):
    """A worker waits at its elastic function, and is admitted when a member is lost."""

    sentence = "{worker} (slot {slot}) waits as a spare on {host}"
    worker: str
    slot: int
    host: str


class SparesMissing(Event, level="warning"):
    """The job has no slots for some of the requested spares."""

    spares: int
    missing: int

    def line(self) -> str:
        spares = f"{count(self.spares, 'spare')} (--spares)"
        return f"{self.missing} of {spares} cannot be started: the hosts have no more slots"


class SlotsMissing(Event, level="warning"):
    """The hosts have fewer slots than the job wants workers. `ends_in_s`: time until the start is abandoned; None once
    there is a generation, whose workers continue."""

    missing: int
    wanted: int
    ends_in_s: float | None

    def line(self) -> str:
        there = self.wanted - self.missing
        text = f"waiting for {count(self.missing, 'more slot')} ({there} of {self.wanted} are available)"
        return text if self.ends_in_s is None else f"{text}; the job ends in {self.ends_in_s:.0f} s (--start-timeout)"


class SlotBackoff(Event, level="warning"):
    """A slot's workers fail repeatedly: `failures` in a row failed soon after their start, so no other one is started
    there for `pause_s`."""

    sentence = (
        "slot {slot} on {host} is in backoff for {pause_s:g} s: {failures} workers in a row "
        "failed there soon after their start"
    )
    slot: int
    host: str
    failures: int
    pause_s: float


class WorkerLost(Event, level="warning"):
    """A worker was lost. `last_lines` is the end of its stderr, as far as its agent had it. `restarts_left` of its
    slot; None where no budget counts, because a lost worker costs its host."""

    worker: str
    slot: int
    how: str
    restarts_left: int | None
    last_lines: tuple[str, ...] = ()

    def line(self) -> str:
        left = "" if self.restarts_left is None else f"; {count(self.restarts_left, 'restart')} left for its slot"
        return f"lost {self.worker} (slot {self.slot}): it {self.how}{left}"


class WorkerFailed(Event):
    """The failure of a worker in detail, where no worker had entered an elastic function. Several workers may fail in
    one attempt; the root cause is the earliest failure.

    rank, local_rank  the place for which it was started
    exit_code         negative for a signal; None: its agent was lost
    message           the last line of the exception, from its error file or as init() reports it; empty: unknown
    traceback         the whole text
    error_file        its path; empty: there is none
    time_s            from the error file, in seconds since 1970; 0: unknown
    was_stopped       it was being stopped already because of another failure
    """

    worker: str
    host: str
    rank: int
    local_rank: int
    attempt: int
    pid: int
    exit_code: int | None
    message: str = ""
    traceback: str = ""
    error_file: str = ""
    time_s: int = 0
    was_stopped: bool = False

    def line(self) -> str:
        what = f": {self.message}" if self.message else ""
        return f"rank {self.rank} ({self.worker}, process {self.pid} on {self.host}) failed{what}"


class AllWorkersRestart(Event, level="warning"):
    """A worker failed while none had entered an elastic function, or there are slots for more workers: all are stopped
    and started again, `workers` of them. `attempt` counts from 1; `attempts` is None where no worker failed."""

    workers: int
    attempt: int
    attempts: int | None
    reason: str

    def line(self) -> str:
        whom = f"all {self.workers} workers" if self.workers != 1 else "the worker"
        if self.attempts is None:
            return f"restarting all workers, {self.workers} from now on: {self.reason}"
        return f"restarting {whom} (attempt {self.attempt} of {self.attempts}): {self.reason}"


class WorkerEnded(Event):
    """The end of a worker that the job does not need any more: it finished, or it left, or it was not needed."""

    sentence = "{worker} (slot {slot}) {how}"
    worker: str
    slot: int
    how: str


class WorkerLeaves(Event):
    """A worker was asked to leave, and leaves at the next boundary."""

    sentence = "{worker} (slot {slot}) was asked to leave and does so at the next boundary"
    worker: str
    slot: int


class UserCodeFailed(Event, level="warning"):
    """An exception of the script has ended a worker."""

    worker: str
    summary: str
    traceback: str

    def line(self) -> str:
        return f"{self.worker} raised {self.summary}\n{self.traceback}".rstrip()


class StallNoticed(Event, level="warning"):
    """No member has made progress for long, and there is no step timeout: the stall is only reported."""

    step: int
    in_own_code: tuple[str, ...]
    waiting: tuple[str, ...]
    stalled_s: float

    def line(self) -> str:
        hung = f"{named(self.in_own_code)} in their own code" if self.in_own_code else "no worker in its own code"
        return (
            f"no step for {self.stalled_s:.0f} s after step {self.step}: {hung}, {named(self.waiting)} waiting; "
            "--step-timeout S stops workers that block the others for S seconds"
        )


class WorkersHung(Event, level="warning"):
    """Workers hang: they have made no progress since `step` while all others wait for them; they are stopped."""

    step: int
    workers: tuple[str, ...]
    stalled_s: float

    def line(self) -> str:
        who = named(self.workers)
        return (
            f"stopping {who}: all other workers waited at step {self.step} for {self.stalled_s:.0f} s (--step-timeout)"
        )


class WorkerStacks(Event, level="warning"):
    """The stacks of the threads of a worker that was stopped for making no progress."""

    worker: str
    stacks: str

    def line(self) -> str:
        return f"the threads of {self.worker} when it was stopped:\n{main_first(self.stacks)}".rstrip()


def main_first(stacks: str) -> str:
    """Move the main thread of these stacks to the front, since readers look for the script first. faulthandler writes
    the newest thread first, and so the main thread last."""
    *others, main = stacks.rstrip().split("\n\n")
    _, *frames = main.split("\n")
    return "\n\n".join(["\n".join(["The main thread (most recent call first):", *frames]), *others])


class CollectiveStalled(Event, level="warning"):
    """All members wait for each other since `step`: a connection between them is broken, or they run different code."""

    step: int
    workers: tuple[str, ...]
    stalled_s: float

    def line(self) -> str:
        return (
            f"all {count(len(self.workers), 'worker')} have waited for each other at step {self.step} for "
            f"{self.stalled_s:.0f} s (--step-timeout)"
        )


class StateHash(Event):
    """In strict mode, at the end of an epoch, or with `--hash-every` within it: the SHA-256 of parameters, buffers and
    optimizer state after `step` steps."""

    sentence = "the state after step {step}, of epoch {epoch}: {hash}"
    step: int
    epoch: int
    hash: str


class ShardWrong(Event, level="warning"):
    """In strict mode, a worker has computed a shard wrongly; `witnesses` did so rightly. The step was not applied.
    The worker ends, and no other one is started in its slot."""

    step: int
    shard: int
    worker: str
    host: str
    witnesses: tuple[str, ...]

    def line(self) -> str:
        return (
            f"{self.worker} on {self.host} has computed shard {self.shard} of step {self.step} wrongly, as the results "
            f"of {named(self.witnesses)} show. It ends, and its slot is not used again; test the processor and the "
            f"memory of {self.host}"
        )


class StragglerFound(Event, level="warning"):
    """With `--balance auto`: a worker has computed slowly for 20 steps in a row. Its speed is below half of the others'
    median, `percent` of it. It gets fewer samples of each global batch meanwhile."""

    sentence = (
        "{worker} (rank {rank}) on {host} is a straggler at step {step}: it computes at "
        "{percent} % of the others' speed"
    )
    worker: str
    rank: int
    host: str
    percent: int
    step: int


class StragglerRecovered(Event):
    """With `--balance auto`: a worker that was a straggler has reached 60 % of the others' median speed, or more."""

    sentence = (
        "{worker} (rank {rank}) on {host} is no straggler any more at step {step}: it "
        "computes at {percent} % of the others' speed"
    )
    worker: str
    rank: int
    host: str
    percent: int
    step: int


class StatesDiverged(Event, level="warning"):
    """States differ: these workers had another state than `source` after `step` steps. `name`: the first parameter,
    buffer or other tensor that differed, of `objects`. They have copied the state of `source`, or the job ends."""

    step: int
    name: str
    objects: int
    workers: tuple[str, ...]
    source: str
    is_fatal: bool

    def line(self) -> str:
        more = f" and {count(self.objects - 1, 'more tensor')}" if self.objects > 1 else ""
        who = named(self.workers)
        done = "the job ends" if self.is_fatal else f"{who} copied the state of {self.source}"
        return f"the states of workers differed at step {self.step}: {self.name}{more} of {who}; {done}"


class StoppedWorkerKilled(Event, level="warning"):
    """A worker was stopped (SIGSTOP) for longer than the detection budget, and was killed because of it."""

    sentence = "{worker} was stopped by a signal for {budget_s:g} s; it is killed"
    worker: str
    budget_s: float
