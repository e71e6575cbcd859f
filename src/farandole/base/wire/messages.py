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
    Placement,
    Shortfall,
    WorkerStatus,
    WorkerTelemetry,
)
from farandole.base.wire.function_call import CallComes, CallPart, PartReceived, ReturnPart
from farandole.base.wire.link_messages import Start, ToWorker, WorkerMessage
from farandole.base.wire.message import Message

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
    software: dict[str, str] = msgspec.field(default_factory=dict)
    resumes: Resumption | None = None


class GuardHello(Message, frozen=True):
    """The first message on the connection that an agent opens for its guard. The only other one is AgentDied."""

    agent: str
    process: str  # as in AgentHello
    version: int


class AgentDied(Message, frozen=True):
    """The agent's process has ended without a farewell, and its workers are killed. The agent seals this message when
    it starts, and hands it to its guard together with the connection: a guard knows no token."""


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
    """A worker's main thread has ended and its process group was killed: it will not act any more. Its exit, with the
    code, follows when the kernel has freed its memory; the slot is not free before."""

    worker: str


class SpawnFailed(Message, frozen=True):
    """A worker's process could not be started at all."""

    worker: str
    error: str


class AgentLeaving(Message, frozen=True):
    """The agent was asked to end (SIGTERM, as a preemption notice): its workers are to leave at the next boundary.
    Answer, once they have left: Dismissed."""

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
    """Lines that a worker wrote, without their ends. `dropped_bytes` is the amount of its output lost before them,
    because the connection could not take it."""

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


class Handled(Message, frozen=True):
    """The sender has handled so many of the counted messages of the session. From both sides."""

    count: int


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

    Attributes:
        detection_budget_s, grace_s: As in JobConfig. The agent sends ten heartbeats in the budget.
        is_elastic: Workers may come and go without ending the job, and are told so as in Horovod.
        fork_server: Whether workers may be forked by a process that has imported torch.
        max_restarts: How often all workers may be started again, for scripts that read it.
        command: The command of each worker, run in `folder`. An empty first word stands for the agent's own Python.
        environment: The variables of each worker in addition to the environment of the agent's machine.
        heartbeat_id: Names this connection in heartbeats as datagrams, to `heartbeat_port`; 0: there are none.
        store_port: The port of the job's store, at the address of the coordinator; 0: there is none.
        needs_folder: The agent cannot serve without `folder`; otherwise its own working directory takes its place.
        epoch: Of the coordinator: higher for each one that takes over.
        patience_s: How long workers continue when the connection to the coordinator has ended, until there is another.
        outlives_silence: So they do when it is silent for the budget: another one may take over on another machine.
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
    """End a worker: SIGTERM, then SIGKILL after `grace_s` seconds; at once when it is 0. With `dumps_stacks` it writes
    the stacks of its threads before, for its WorkerExited."""

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
    """The job goes on without this host, which has no worker of it any more; the agent ends. With `is_drained` a user
    has requested that: no other agent is to be started there."""

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
