"""Messages between worker, agent and coordinator. Typed, validated on arrival, never pickled.

A worker communicates only with its agent; the agent forwards the worker's messages to the coordinator inside
`FromWorker`, and the coordinator's answers back. Every message about a membership carries the number of its generation,
so that outdated messages can be recognized (protocol: fencing).
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from farandole.base.config import ForkServerUse
from farandole.base.membership import (
    DataAddress,
    GenerationId,
    Peer,
    Placement,
    Progress,
    Shortfall,
    WorkerStatus,
    WorkerTelemetry,
)

PROTOCOL_VERSION, OLDEST_PROTOCOL_VERSION = 9, 9
"""The newest and the oldest version of the protocol that this release speaks, on all connections. Two ends use the
newest version that both speak (wire/authentication.py).

The number stands for everything on which processes of a job must agree: messages and their fields, the proofs, data
connections, and what workers compute together, such as the order of samples. A release that changes any of it raises
the newest number. It raises the oldest one, too, unless it also speaks the former version: it must not send a peer of
that version anything newer.
"""


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The base class of all messages; the class's name is the tag on the wire."""


# Worker -> agent (-> coordinator) -------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """The first message of a worker: it called `init()` and listens for its peers at `address`."""

    worker: str
    secret: str  # given to the worker by its agent; not forwarded
    pid: int
    version: int
    address: DataAddress


class Elastic(Message, frozen=True):
    """The main thread entered an elastic function: a member is recoverable from now on.

    A worker that is not a member yet asks to be admitted and is READY for any generation.
    """


class Ready(Message, frozen=True):
    """The main thread is quiescent: no collective of an older generation can touch its memory any more."""

    number: int


class Synced(Message, frozen=True):
    """The state of this worker equals the source's in generation `number`: it is a holder now."""

    number: int


class LinkBroken(Message, frozen=True):
    """A data connection of generation `number` failed, or its main thread has left the generation by itself, as
    `detail` says. This is a hint, never a verdict."""

    number: int
    peer: str
    direction: str  # "send" | "receive" | "connect" | "left"
    detail: str


class Probed(Message, frozen=True):
    """The worker has tried to connect to its neighbours' data listeners in generation `number`, with these results.

    The reason is that no data moved, or that it was asked to. The coordinator judges the evidence.
    """

    number: int
    reachable: tuple[str, ...]
    unreachable: tuple[str, ...]


class Connected(Message, frozen=True):
    """The way that tensors move in generation `number` has changed to this one. From rank 0, for the log only."""

    number: int
    way: str


class FirstStep(Message, frozen=True):
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

    Attributes:
        name, objects: The first parameter, buffer or other tensor that differed, and the number of such tensors.
        ranks, source: The ranks that differed, and the rank whose state all workers have now.
        is_fatal: The job ends instead.
    """

    number: int
    step: int
    name: str
    objects: int
    ranks: tuple[int, ...]
    source: int
    is_fatal: bool


class StateHashed(Message, frozen=True):
    """The members of generation `number` have a state with this hash after `step` steps. From rank 0, for the log
    only."""

    number: int
    step: int
    epoch: int
    hash: str


class ShardDiffered(Message, frozen=True):
    """In generation `number` some ranks have computed a shard of strict mode wrongly. From these ranks, and from the
    lowest other one.

    Attributes:
        step: The step, which is not applied.
        shard: The shard.
        ranks: The ranks that were wrong.
        witnesses: The ranks that have computed it, too, and agree on another result.
    """

    number: int
    step: int
    shard: int
    ranks: tuple[int, ...]
    witnesses: tuple[int, ...]


class StragglerSeen(Message, frozen=True):
    """A member of generation `number` has computed slowly for many steps. From rank 0, for the log only.

    Attributes:
        rank, percent: The member, and its speed in percent of the others' median.
        is_slow: False: it was slow before, and is not any more.
    """

    number: int
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


class Finished(Message, frozen=True):
    """The elastic function returned on this worker, in generation `number`.

    Attributes:
        shortfall: The training that its loader had promised and that was not done.
        static_because: The script has left the function in its middle, and goes on training with the workers of this
            generation as a static job, for this reason; empty: it has not.
    """

    number: int
    shortfall: Shortfall | None = None
    static_because: str = ""


class Leaving(Message, frozen=True):
    """The worker was asked to leave (SIGTERM) and does so at the next boundary."""


class MayPublish(Message, frozen=True):
    """All files but the manifest of the checkpoint `name` are on the disk. Answer: PublishAnswer.

    With `file` the request is not for a checkpoint but for a file of the script's own, by this path; `name` then only
    distinguishes requests.
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
    """Answer to a Hello while the job already runs: this worker is a world of one until it is admitted.

    `members` is the number of workers of the running generation, `step` that of the steps it has decided at least.
    """

    members: int
    step: int = 0


class Abort(Message, frozen=True):
    """A fault: all operations of generations below `number` must end now. Answer: Ready(number)."""

    number: int
    reason: str


class Probe(Message, frozen=True):
    """Request to test the connections to the neighbours of generation `number`, since a peer cannot reach this worker.

    Answer: Probed, also while the main thread computes.
    """

    number: int


class Prepare(Message, frozen=True):
    """A planned change: move to generation `number` at a boundary that all members agree on.

    Answer, once there: Ready(number). An Abort with a higher number cancels it. `update` is the kind of change, in
    Horovod's numbers: 1 workers go, 2 workers come, 3 both.
    """

    number: int
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


class Released(Message, frozen=True):
    """Every member of generation `number` has finished: the elastic function may return. The answer to Finished."""

    number: int


class Left(Message, frozen=True):
    """The others go on without this worker; it may exit."""


class Stop(Message, frozen=True):
    """The job ends for the given `reason`. The worker exits.

    With `saves` this worker writes an emergency checkpoint first; only one worker does.
    """

    reason: str
    saves: bool = False


class PublishAnswer(Message, frozen=True):
    """Answer to MayPublish. `refusal` is the reason, empty when the manifest may be written."""

    name: str
    refusal: str


ToWorker: TypeAlias = Newcomer | Abort | Probe | Prepare | Start | Released | Left | Stop | PublishAnswer


# Agent -> coordinator -------------------------------------------------------------------------------------------------


class Resumption(msgspec.Struct, frozen=True):
    """The session that an agent continues on a new connection.

    Attributes:
        epoch: The highest epoch of a coordinator that it has served.
        handled: The number of the coordinator's counted messages (wire/message_log.py) that it has handled.
    """

    epoch: int
    handled: int


class AgentHello(Message, frozen=True):
    """The first message of an agent, after both ends proved the job token.

    Attributes:
        process: Random, the same for the life of the agent's process: another one must not take its place.
        is_apart: It belongs to another machine, or was not started by the launcher. Answer: Welcome or Refused.
        software: The versions there; those of the coordinator must be equal. Empty: unknown.
        resumes: Its workers run, and it continues its session. Answer: Resumed, SessionOver or TellWorkers. None: it
            begins one.
    """

    agent: str
    host: str
    slots: int
    version: int
    process: str = ""
    is_apart: bool = False
    software: dict[str, str] = {}
    resumes: Resumption | None = None


class GuardHello(Message, frozen=True):
    """The first message on the connection that an agent opens for its guard. The only other one is AgentDied."""

    agent: str
    process: str  # as in AgentHello
    version: int


class AgentDied(Message, frozen=True):
    """The agent's process has ended without a farewell, and its workers are killed.

    The agent seals this message when it starts, and hands it to its guard together with the connection: a guard knows
    no token.
    """


class FromWorker(Message, frozen=True):
    """A worker's message, forwarded by its agent."""

    worker: str
    message: WorkerMessage


class RecordedError(msgspec.Struct, frozen=True):
    """The contents of a worker's error file, as torch's `@record` writes it
    (torch/distributed/elastic/multiprocessing/errors/error_handler.py of torch 2.13).

    Attributes:
        message: The last line of the exception.
        traceback: The whole text; empty: there is none.
        time_s: When it was written, in seconds since 1970; 0: unknown.
        file: The path of the file, on the host of the worker; empty: it is removed with the job.
    """

    message: str
    traceback: str
    time_s: int
    file: str


class WorkerExited(Message, frozen=True):
    """A worker's process is gone and reaped; its process group was killed.

    Attributes:
        exit_code: As in subprocess: negative for a signal.
        last_lines: The end of its stderr.
        stacks: The stacks of its threads, if they were requested.
        pid: Of the process; 0: unknown.
        error: The error that it wrote to its error file; None: there is none.
    """

    worker: str
    exit_code: int
    last_lines: tuple[str, ...] = ()
    stacks: str = ""
    pid: int = 0
    error: RecordedError | None = None


class WorkerDying(Message, frozen=True):
    """A worker's main thread has ended and its process group was killed: it will not act any more.

    Its exit, with the code, follows when the kernel has freed its memory; the slot is not free before.
    """

    worker: str


class SpawnFailed(Message, frozen=True):
    """A worker's process could not be started at all."""

    worker: str
    error: str


class AgentLeaving(Message, frozen=True):
    """The agent was asked to end (SIGTERM, as a preemption notice): its workers are to leave at the next boundary.

    Answer, once they have left: Dismissed.
    """

    reason: str


class WorkerMet(Message, frozen=True):
    """A worker has met the others, in init() or in a process group of torch.distributed. Without `has_met`: it has made
    a step of an optimizer, and has not met them."""

    worker: str
    has_met: bool


class StacksWritten(Message, frozen=True):
    """Answer to WriteStacks with this number.

    Attributes:
        text: The stacks, as faulthandler writes them; empty: there are none.
        problem: Why there are none; empty: there are.
    """

    number: int
    worker: str
    text: str
    problem: str = ""


class Heartbeat(Message, frozen=True):
    """The agent is alive.

    Attributes:
        received: The newest CoordinatorHeartbeat that it received; None when it gets none.
        workers: The status of all its workers that report one. In a few heartbeats a second at most, when that has
            changed, and every few seconds when it has not; None: in another heartbeat.
        telemetry: The measurements of all its workers, about once a second; None: in another heartbeat.
    """

    sequence: int
    received: int | None = None
    workers: dict[str, WorkerStatus] | None = None
    telemetry: dict[str, WorkerTelemetry] | None = None


class WorkerPrinted(Message, frozen=True):
    """Lines that a worker wrote, without their ends.

    `dropped_bytes` is the amount of its output lost before them, because the connection could not take it.
    """

    worker: str
    stream: Literal["stdout", "stderr"]
    lines: tuple[bytes, ...]
    dropped_bytes: int = 0


class WorkerRanked(Message, frozen=True):
    """Lines of the worker belong to this rank from now on, or will most likely do so."""

    worker: str
    rank: int
    is_expected: bool


class WorkerSilent(Message, frozen=True):
    """The worker has ended and all its lines have been sent."""

    worker: str


class ReturnPart(Message, frozen=True):
    """A part of the file in which a worker of farandole.run() has left its result or its traceback; before its
    WorkerExited. Answer: PartReceived, for which the agent waits before it sends the next part.

    Attributes:
        data: At most PART_BYTES of wire/function_call.py.
        age_s: The time since the worker wrote the file.
    """

    worker: str
    data: bytes
    is_last: bool
    age_s: float


class Handled(Message, frozen=True):
    """The sender has handled so many of the counted messages of the session. From both sides."""

    count: int


class CallReceived(Message, frozen=True):
    """Answer to CallComes: all parts of the call have arrived."""


class ToldWorker(msgspec.Struct, frozen=True):
    """A worker that runs, as far as its agent knows from the messages in both directions.

    Attributes:
        address, pid, has_met, is_elastic, ready, synced, stepped, finished, shortfall, static_because, is_leaving,
            has_left: As in coordinator/job.py, Worker.
        raised: The last line of the exception that ends it; empty: it has raised none.
        generation, rank, size: Of its newest START; None: it had none.
        announced: The highest number of an ABORT or a PREPARE for it.
        released: The generation of its Released; 0: it had none.
        is_newcomer: It was told that the job already ran when it came.
        is_dying: Its WorkerDying was sent.
    """

    worker: str
    slot: int
    address: DataAddress | None = None
    pid: int = 0
    has_met: bool = False
    is_elastic: bool = False
    generation: GenerationId | None = None
    rank: int = 0
    size: int = 0
    announced: int = 0
    ready: int = 0
    synced: int = 0
    stepped: int = 0
    finished: int = 0
    shortfall: Shortfall | None = None
    static_because: str = ""
    released: int = 0
    is_leaving: bool = False
    has_left: bool = False
    raised: str = ""
    is_newcomer: bool = False
    is_dying: bool = False


class WorkersTold(Message, frozen=True):
    """Answer to TellWorkers: all workers of this agent that run. Answer: Resumed or SessionOver.

    Attributes:
        number: The highest number of a generation, begun or announced, of which this agent knows.
        attempt: The highest one in which a worker was started here.
        leaving: The reason of this agent's AgentLeaving; empty: it has sent none.
        ending: The reason of the newest Stop for a worker; empty: there was none.
    """

    job_id: str
    workers: tuple[ToldWorker, ...]
    number: int = 0
    attempt: int = 0
    leaving: str = ""
    ending: str = ""


OutputMessage: TypeAlias = WorkerPrinted | WorkerRanked | WorkerSilent

AgentMessage: TypeAlias = (
    AgentHello
    | FromWorker
    | WorkerDying
    | WorkerExited
    | SpawnFailed
    | WorkerMet
    | StacksWritten
    | AgentLeaving
    | Heartbeat
    | WorkerPrinted
    | WorkerRanked
    | WorkerSilent
    | ReturnPart
    | Handled
    | WorkersTold
)


# Coordinator -> agent -------------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """Answer to the AgentHello of a separate agent: the facts of the job that it needs.

    The other fields are as in AgentConfig.

    Attributes:
        command: The command of each worker, run in `folder`. An empty first word stands for the agent's own Python.
        environment: The variables of each worker in addition to the environment of the agent's machine.
        heartbeat_id: Names this connection in datagrams with heartbeats, which go to `heartbeat_port`; 0: there are
            none.
        store_port: The port of the job's store, at the address of the coordinator; 0: there is none.
        needs_folder: The agent cannot serve without `folder`; otherwise its own working directory takes its place.
        epoch: Of the coordinator: higher for each one that takes over.
        patience_s: How long workers continue when the connection to the coordinator has ended, until there is another.
        outlives_silence: So they do when the coordinator is silent for longer than the budget: another one may take
            over on another machine.
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
    store_port: int = 0
    max_restarts: int = 0
    needs_folder: bool = True
    epoch: int = 1
    patience_s: float = 0.0
    outlives_silence: bool = False


class Resumed(Message, frozen=True):
    """Answer to an AgentHello that resumes: the session continues with this coordinator.

    Attributes:
        epoch: Of the coordinator, at least that of the agent.
        handled: The number of the agent's counted messages that the coordinator has handled.
        heartbeat_id, heartbeat_port, store_port: As in Welcome.
    """

    epoch: int
    handled: int
    heartbeat_id: bytes = b""
    heartbeat_port: int = 0
    store_port: int = 0


class TellWorkers(Message, frozen=True):
    """Answer to an AgentHello that resumes: the coordinator has lost its journal, and finds out from the agents what
    the job is. Answer: WorkersTold. The session begins anew; the agent keeps its workers.

    Attributes:
        epoch: As in Resumed.
    """

    epoch: int


class SessionOver(Message, frozen=True):
    """Answer to an AgentHello that resumes: the coordinator has lost this agent, and its workers must end."""

    reason: str


class CallComes(Message, frozen=True):
    """Before Welcome: the call of farandole.run() follows, `size` bytes in several CallPart. Answer: CallReceived."""

    size: int


class CallPart(Message, frozen=True):
    """The next part of the call."""

    data: bytes


class PartReceived(Message, frozen=True):
    """Answer to a ReturnPart of this worker."""

    worker: str


class Refused(Message, frozen=True):
    """Answer to an AgentHello: this agent may not join. With `is_final`, it may not join later either."""

    reason: str
    is_final: bool


class CoordinatorHeartbeat(Message, frozen=True):
    """The coordinator is alive.

    Attributes:
        received: The newest Heartbeat that it received.
        every_s: The time between two heartbeats of the agent from now on; 0: as before.
    """

    sequence: int
    received: int
    every_s: float = 0.0


class Spawn(Message, frozen=True):
    """Start a worker in this slot.

    Attributes:
        expected: The place that it will most likely get, for scripts that read it before init().
        attempt: How often all workers of the job have been started again; the store begins empty each time.
        group_rank, group_size: The place of its host among the hosts of the expected workers, and their number.
    """

    worker: str
    slot: int
    expected: Placement | None = None
    attempt: int = 0
    group_rank: int = 0
    group_size: int = 1


class Kill(Message, frozen=True):
    """End a worker: SIGTERM, then SIGKILL after `grace_s` seconds; at once when it is 0.

    With `dumps_stacks` it writes the stacks of its threads before, for its WorkerExited.
    """

    worker: str
    grace_s: float
    reason: str
    dumps_stacks: bool = False


class WriteStacks(Message, frozen=True):
    """Have a worker write the stacks of its threads; it continues. Answer: StacksWritten. Neither is sent again when
    the connection ends: the one who wants to know asks again."""

    number: int
    worker: str


class ForwardToWorkers(Message, frozen=True):
    """Send the same message to several workers of this agent."""

    workers: tuple[str, ...]
    message: ToWorker


class StartWorkers(Message, frozen=True):
    """The START messages of all members of the generation on this agent."""

    starts: dict[str, Start]


class Dismissed(Message, frozen=True):
    """The job goes on without this host, which has no worker of it any more; the agent ends.

    With `is_drained` a user has requested that: no other agent is to be started there.
    """

    reason: str
    is_drained: bool = False


class JobOver(Message, frozen=True):
    """The job is over; the agent ends its remaining workers and exits."""

    exit_code: int
    reason: str


ToAgent: TypeAlias = (
    Welcome
    | Resumed
    | TellWorkers
    | SessionOver
    | Handled
    | Refused
    | CallComes
    | CallPart
    | CoordinatorHeartbeat
    | Spawn
    | Kill
    | WriteStacks
    | ForwardToWorkers
    | StartWorkers
    | PartReceived
    | Dismissed
    | JobOver
)
