"""What worker, agent and coordinator say to each other. Typed, validated on arrival, never pickled.

A worker talks with its agent only; the agent carries the worker's messages to the coordinator inside
`FromWorker` and the coordinator's answers back. Every message that speaks of a membership carries the
number of its generation, so that old news can be told from new (protocol: fencing).
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from farandole.config import ForkServerUse
from farandole.membership import Address, GenerationId, Peer, Placement, Progress, Shortfall
from farandole.worker_status import WorkerStatus

PROTOCOL_VERSION = 2


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the class's name is the tag on the wire."""


# Worker -> agent (-> coordinator) --------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of a worker: it called `init()` and listens for its peers at `address`."""

    worker: str
    secret: str  # given to the worker by its agent; not carried further
    pid: int
    version: int
    address: Address


class Elastic(Message, frozen=True):
    """The main thread entered an elastic function: a member is recoverable from now on;
    a worker that is no member yet asks to be admitted and is READY for any generation."""


class Ready(Message, frozen=True):
    """The main thread is quiescent: no collective of an older generation can touch its memory any more."""

    number: int


class Synced(Message, frozen=True):
    """The state of this worker equals the source's in generation `number`: it is a holder now."""

    number: int


class LinkBroken(Message, frozen=True):
    """A hint, never a verdict: a data connection of generation `number` failed."""

    number: int
    peer: str
    direction: str  # "send" | "receive" | "connect"
    detail: str


class Probed(Message, frozen=True):
    """In generation `number` this worker tried to connect to its neighbours' data listeners anew, because nothing moved
    or it was asked to: these answered, those did not. Evidence; the coordinator judges."""

    number: int
    reachable: tuple[str, ...]
    unreachable: tuple[str, ...]


class Connected(Message, frozen=True):
    """In generation `number` tensors move this way, unlike before. From rank 0, for the log only."""

    number: int
    way: str


class FirstStep(Message, frozen=True):
    """The first step of generation `number` is decided here. Once per regroup; durations, one after the other.

    ready_s       from an ABORT heard until READY was said; 0 for a planned change
    waited_s      until START: for the others, and for the coordinator
    connected_s   until the data connections stood
    synced_s      until the state was everybody's
    stepped_s     until the step was decided
    steps_redone, samples_redone   begun before the fault, and done again; of the whole job
    counts        what progress is counted in: under the commit rule in commits
    began_at      so many of them there were when the state was everybody's. Under the commit rule it went back there,
                  and steps_redone are this worker's since that commit, which are done again
    """

    number: int
    ready_s: float
    waited_s: float
    connected_s: float
    synced_s: float
    stepped_s: float
    steps_redone: int
    samples_redone: int
    counts: Literal["step", "commit"] = "step"
    began_at: int = 0


class StatesDiffered(Message, frozen=True):
    """Members of generation `number` had different states after `step` steps. From rank 0, for the log only.

    name, objects  the first parameter, buffer or other tensor that differed, and how many did
    ranks, source  whose, and the rank whose state is everybody's now
    is_fatal       the job ends instead
    """

    number: int
    step: int
    name: str
    objects: int
    ranks: tuple[int, ...]
    source: int
    is_fatal: bool


class Failed(Message, frozen=True):
    """User code raised. `summary` is the exception's last line, `traceback` the whole text."""

    summary: str
    traceback: str


class Finished(Message, frozen=True):
    """The elastic function returned on this worker, in generation `number`; `shortfall`: what it did not do of what
    its loader had promised."""

    number: int
    shortfall: Shortfall | None = None


class Leaving(Message, frozen=True):
    """This worker was asked to leave (SIGTERM) and does so at the next boundary."""


class MayPublish(Message, frozen=True):
    """All but the manifest of the checkpoint `name` is on the disk. Answer: PublishAnswer.

    file  not a checkpoint but a file of the script's own, by this path; `name` only tells one question from another
    """

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
    | Failed
    | Finished
    | Leaving
    | MayPublish
    | CheckpointEnded
)


# Coordinator -> agent -> worker ----------------------------------------------------------------------


class Newcomer(Message, frozen=True):
    """Answer to a Hello while the job runs already: this worker is a world of one until it is admitted. `members`: how
    many workers the generation has that runs now."""

    members: int


class Abort(Message, frozen=True):
    """A fault: whatever runs in a generation below `number` must end now. Answer: Ready(number)."""

    number: int
    reason: str


class Probe(Message, frozen=True):
    """Somebody cannot reach this worker: can it reach its neighbours of generation `number`? Answer: Probed, also while
    the main thread computes."""

    number: int


class Prepare(Message, frozen=True):
    """A planned change: move to generation `number` at a boundary that all members agree on.
    Answer, once there: Ready(number). An Abort with a higher number cancels it.

    update  what changes, in Horovod's numbers: 1 workers go, 2 workers come, 3 both
    """

    number: int
    reason: str
    update: int = 0


class Start(Message, frozen=True):
    """Generation `id` begins. To each member its own place and its neighbours on the ring.

    bootstrap  nobody holds state yet: rank 0's is everybody's
    data_key  proves both ends of the data connections of this generation; derived by the agent from the
              job token, never sent over a network
    """

    id: GenerationId
    placement: Placement
    previous: Peer
    next: Peer
    bootstrap: bool
    data_key: bytes = b""


class Released(Message, frozen=True):
    """Every member of generation `number` has finished: the elastic function may return."""

    number: int


class Left(Message, frozen=True):
    """The others go on without this worker; it may exit."""


class Stop(Message, frozen=True):
    """The job ends; `reason` says why. The worker exits.

    saves  before that, this one of the workers writes an emergency checkpoint
    """

    reason: str
    saves: bool = False


class PublishAnswer(Message, frozen=True):
    """Answer to MayPublish; `refusal` says why not, and is empty when the manifest may be written."""

    name: str
    refusal: str


ToWorker: TypeAlias = Newcomer | Abort | Probe | Prepare | Start | Released | Left | Stop | PublishAnswer


# Agent -> coordinator --------------------------------------------------------------------------------


class AgentHello(Message, frozen=True):
    """First message of an agent, after both proved the job token.

    process    random, the same for the life of the agent's process: another one must not take its place
    is_apart   it is no part of the coordinator's process. Answer: Welcome or Refused
    """

    agent: str
    host: str
    slots: int
    version: int
    process: str = ""
    is_apart: bool = False


class FromWorker(Message, frozen=True):
    """A worker's message, carried by its agent."""

    worker: str
    message: WorkerMessage


class WorkerExited(Message, frozen=True):
    """A worker's process is gone and reaped; its process group was killed.
    `exit_code` as subprocess gives it: negative for a signal. `last_lines`: the end of its stderr. `stacks`: where its
    threads were, if that was asked for."""

    worker: str
    exit_code: int
    last_lines: tuple[str, ...] = ()
    stacks: str = ""


class WorkerDying(Message, frozen=True):
    """A worker's main thread has ended and its process group was killed: it will not do anything any more. Its exit,
    with the code, follows when the kernel has freed its memory; the slot is not free before."""

    worker: str


class SpawnFailed(Message, frozen=True):
    """A worker's process could not be started at all."""

    worker: str
    error: str


class AgentLeaving(Message, frozen=True):
    """The agent was asked to end (SIGTERM, as a preemption notice): its workers are to leave at the next boundary.
    Answer, once they have: Dismissed."""

    reason: str


class WorkersSeen(Message, frozen=True):
    """Where all workers of this agent are that can be seen: when that changes, a few times a second at most, and every
    few seconds when it does not."""

    workers: dict[str, WorkerStatus]


class Heartbeat(Message, frozen=True):
    """The agent is alive. `heard`: the newest CoordinatorHeartbeat that reached it; None when it gets none."""

    sequence: int
    heard: int | None = None


class WorkerPrinted(Message, frozen=True):
    """Lines that a worker wrote, without their ends. `dropped_bytes`: of its output before them, because the
    connection could not take it."""

    worker: str
    stream: Literal["stdout", "stderr"]
    lines: tuple[bytes, ...]
    dropped_bytes: int = 0


class WorkerRanked(Message, frozen=True):
    """Lines of the worker are those of this rank from now on; or it will most likely get it."""

    worker: str
    rank: int
    is_expected: bool


class WorkerSilent(Message, frozen=True):
    """The worker has ended and all its lines have come."""

    worker: str


OutputMessage: TypeAlias = WorkerPrinted | WorkerRanked | WorkerSilent

AgentMessage: TypeAlias = (
    AgentHello
    | FromWorker
    | WorkerDying
    | WorkerExited
    | SpawnFailed
    | WorkersSeen
    | AgentLeaving
    | Heartbeat
    | WorkerPrinted
    | WorkerRanked
    | WorkerSilent
)


# Coordinator -> agent --------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """Answer to the AgentHello of an agent apart: what it has to know of the job.

    command      what each worker runs, in `folder`
    environment  what its environment has beside that of the agent's machine
    heartbeat_id  names this connection in datagrams with heartbeats, which go to `heartbeat_port`; 0: there are none
    The others are as in AgentConfig.
    """

    job_id: str
    command: tuple[str, ...]
    folder: str
    environment: dict[str, str]
    detection_budget_s: float
    grace_s: float
    is_elastic: bool
    heartbeat_id: bytes = b""
    heartbeat_port: int = 0
    fork_server: ForkServerUse = "off"


class Refused(Message, frozen=True):
    """Answer to an AgentHello: this agent may not join. `is_final`: nor later."""

    reason: str
    is_final: bool


class CoordinatorHeartbeat(Message, frozen=True):
    """The coordinator is alive. `heard`: the newest Heartbeat that reached it."""

    sequence: int
    heard: int


class Spawn(Message, frozen=True):
    """Start a worker in this slot. `expected`: the place that it will most likely get, for scripts that look at it
    before init()."""

    worker: str
    slot: int
    expected: Placement | None = None


class Kill(Message, frozen=True):
    """End a worker: SIGTERM, then SIGKILL after `grace_s` seconds; at once when it is 0. With `dumps_stacks` it writes
    the stacks of its threads before, for its WorkerExited."""

    worker: str
    grace_s: float
    reason: str
    dumps_stacks: bool = False


class TellWorkers(Message, frozen=True):
    """The same message to several workers of this agent."""

    workers: tuple[str, ...]
    message: ToWorker


class StartWorkers(Message, frozen=True):
    """One START for each member of the generation that lives on this agent."""

    starts: dict[str, Start]


class Dismissed(Message, frozen=True):
    """The job goes on without this host, on which no worker of it is left; the agent goes.

    is_drained  somebody wanted so: no other agent is to be started there
    """

    reason: str
    is_drained: bool = False


class JobEnded(Message, frozen=True):
    """The job is over; the agent ends what is left of its workers and goes."""

    exit_code: int
    reason: str


ToAgent: TypeAlias = (
    Welcome | Refused | CoordinatorHeartbeat | Spawn | Kill | TellWorkers | StartWorkers | Dismissed | JobEnded
)
