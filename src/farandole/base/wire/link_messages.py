"""Messages between a worker and its agent, which passes them on to and from the coordinator."""

from __future__ import annotations

from typing import Literal, TypeAlias

from farandole.base.membership import DataAddress, GenerationId, Peer, Placement, Progress, Shortfall
from farandole.base.wire.message import Message


class OfGeneration(Message, frozen=True):
    """A message about generation `number`; one about an earlier generation changes nothing."""

    number: int


class Hello(Message, frozen=True):
    """The first message of a worker: it called `init()` and listens for its peers at `address`."""

    worker: str
    secret: str  # given to the worker by its agent; not forwarded
    pid: int
    version: int
    address: DataAddress


class Elastic(Message, frozen=True):
    """The main thread entered an elastic function: a member is recoverable from now on. A worker that is not a member
    yet asks to be admitted and is READY for any generation."""


class Ready(OfGeneration, frozen=True):
    """The main thread is quiescent: no collective of an older generation can touch its memory any more."""


class Synced(OfGeneration, frozen=True):
    """The state of this worker equals the source's in generation `number`: it is a holder now."""


class LinkBroken(OfGeneration, frozen=True):
    """A data connection of generation `number` failed, or its main thread has left the generation by itself, as
    `detail` says. This is a hint, never a verdict."""

    peer: str
    direction: str  # "send" | "receive" | "connect" | "left"
    detail: str


class Probed(OfGeneration, frozen=True):
    """The worker has tried to connect to its neighbours' data listeners in generation `number`, with these results. The
    reason is that no data moved, or that it was asked to. The coordinator judges the evidence."""

    reachable: tuple[str, ...]
    unreachable: tuple[str, ...]


class Connected(OfGeneration, frozen=True):
    """The way that tensors move in generation `number` has changed to this one. From rank 0, for the log only."""

    way: str


class FirstStep(OfGeneration, frozen=True):
    """The first step of generation `number` is decided here. When all survivors have sent it, the recovery is over: the
    coordinator reports it and starts the replacement (coordinator/regroup.py). Once per regroup; durations, one after
    the other.

    Attributes:
        ready_s: From the receipt of ABORT until READY was sent; 0 for a planned change.
        waited_s: Until START: for the others, and for the coordinator.
        connected_s: Until the data connections were established.
        synced_s: Until all workers had the state.
        stepped_s: Until the step was decided.
        steps_redone, samples_redone: Begun before the fault, and done again; of the whole job.
        counts: The unit of progress: commits under the commit rule.
        began_at: The count when all workers had the state. Under the commit rule the state was reset to that commit,
            and steps_redone are this worker's steps since then, which are done again.
    """

    ready_s: float
    waited_s: float
    connected_s: float
    synced_s: float
    stepped_s: float
    steps_redone: int
    samples_redone: int
    counts: Literal["step", "commit"] = "step"
    began_at: int = 0


class StatesDiffered(OfGeneration, frozen=True):
    """Members of generation `number` had different states after `step` steps. From rank 0, for the log only.

    Attributes:
        name, objects: The first parameter, buffer or other tensor that differed, and the number of such tensors.
        ranks, source: The ranks that differed, and the rank whose state all workers have now.
        is_fatal: The job ends instead.
    """

    step: int
    name: str
    objects: int
    ranks: tuple[int, ...]
    source: int
    is_fatal: bool


class StateHashed(OfGeneration, frozen=True):
    """The members of generation `number` have a state with this hash after `step` steps. From rank 0, for the log
    only."""

    step: int
    epoch: int
    hash: str


class ShardDiffered(OfGeneration, frozen=True):
    """In generation `number` some ranks have computed a shard of strict mode wrongly. From these ranks, and from the
    lowest other one.

    Attributes:
        step: The step, which is not applied.
        shard: The shard.
        ranks: The ranks that were wrong.
        witnesses: The ranks that have computed it, too, and agree on another result.
    """

    step: int
    shard: int
    ranks: tuple[int, ...]
    witnesses: tuple[int, ...]


class StragglerSeen(OfGeneration, frozen=True):
    """A member of generation `number` has computed slowly for many steps. From rank 0, for the log only.

    Attributes:
        rank, percent: The member, and its speed in percent of the others' median.
        is_slow: False: it was slow before, and is not any more.
    """

    step: int
    rank: int
    percent: int
    is_slow: bool


class Remark(Message, frozen=True):
    """Something that the result of the job needs to be read with. From rank 0, for the log and the last line of the job
    only.

    Attributes:
        topic: A later remark of the same topic replaces this one.
        text: A clause, without a full stop.
    """

    topic: str
    text: str


class WorkersFixed(Message, frozen=True):
    """What is trained depends on the number of workers, so that there may be no other one. From rank 0.

    Attributes:
        number: The number of workers at the start.
        because: Why; a clause.
    """

    number: int
    because: str


class Failed(Message, frozen=True):
    """User code raised an exception. `summary` is its last line, `traceback` the whole text."""

    summary: str
    traceback: str


class Finished(OfGeneration, frozen=True):
    """The elastic function returned on this worker, in generation `number`.

    Attributes:
        shortfall: The training that its loader had promised and that was not done.
        static_because: The script has left the function in its middle, and goes on training with the workers of this
            generation as a static job, for this reason; empty: it has not.
    """

    shortfall: Shortfall | None = None
    static_because: str = ""


class Leaving(Message, frozen=True):
    """The worker was asked to leave (SIGTERM) and does so at the next boundary."""


class MayPublish(Message, frozen=True):
    """All files but the manifest of the checkpoint `name` are on the disk. Answer: PublishAnswer. With `file` the
    request is not for a checkpoint but for a file of the script's own, by this path; `name` then only distinguishes
    requests."""

    name: str
    progress: Progress
    file: str = ""


class CheckpointEnded(Message, frozen=True):
    """The checkpoint `name` is published; or, with an `error`, there is none. For the log only."""

    name: str
    step: int
    took_s: float
    error: str = ""


WorkerMessage: TypeAlias = (
    Hello
    | Elastic
    | Ready
    | Synced
    | LinkBroken
    | Probed
    | Connected
    | FirstStep
    | StatesDiffered
    | StateHashed
    | ShardDiffered
    | StragglerSeen
    | Remark
    | WorkersFixed
    | Failed
    | Finished
    | Leaving
    | MayPublish
    | CheckpointEnded
)


# Coordinator -> agent -> worker ---------------------------------------------------------------------------------------


class Newcomer(Message, frozen=True):
    """Answer to a Hello while the job already runs: this worker is a world of one until it is admitted. `members` is
    the number of workers of the running generation, `step` that of the steps it has decided at least."""

    members: int
    step: int = 0


class Abort(OfGeneration, frozen=True):
    """A fault: all operations of generations below `number` must end now. Answer: Ready(number)."""

    reason: str


class Probe(OfGeneration, frozen=True):
    """Request to test the connections to the neighbours of generation `number`, since a peer cannot reach this worker.
    Answer: Probed, also while the main thread computes."""


class Prepare(OfGeneration, frozen=True):
    """A planned change: move to generation `number` at a boundary that all members agree on. Answer, once there:
    Ready(number). An Abort with a higher number cancels it. `update` is the kind of change, in Horovod's numbers: 1
    workers go, 2 workers come, 3 both."""

    reason: str
    update: int = 0


class Start(Message, frozen=True):
    """Generation `id` begins. Each member receives its own place and its neighbours on the ring.

    Attributes:
        bootstrap: No worker holds state yet: all workers take that of rank 0.
        data_key: Proves both ends of the data connections of this generation; derived by the agent from the job token,
            never sent over a network.
    """

    id: GenerationId
    placement: Placement
    previous: Peer
    next: Peer
    bootstrap: bool
    data_key: bytes = b""


class Released(OfGeneration, frozen=True):
    """Every member of generation `number` has finished: the elastic function may return. The answer to Finished."""


class Left(Message, frozen=True):
    """The others go on without this worker; it may exit."""


class Stop(Message, frozen=True):
    """The job ends for the given `reason`. The worker exits. With `saves` this worker writes an emergency checkpoint
    first; only one worker does."""

    reason: str
    saves: bool = False


class PublishAnswer(Message, frozen=True):
    """Answer to MayPublish. `refusal` is the reason, empty when the manifest may be written."""

    name: str
    refusal: str


ToWorker: TypeAlias = Newcomer | Abort | Probe | Prepare | Start | Released | Left | Stop | PublishAnswer
