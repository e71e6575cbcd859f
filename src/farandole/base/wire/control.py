"""Messages between a user's command and the coordinator: requests, answers, and the status of a job.

They use the same authenticated connection as an agent's messages; the first message tells which of the two has dialed.
coordinator/control_requests.py makes a Status, coordinator/command_server.py answers, launch/control_client.py asks.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from farandole.base.membership import WorkerTelemetry
from farandole.base.wire.message import Message

# Command -> coordinator -----------------------------------------------------------------------------------------------


class ClientHello(Message, frozen=True):
    """The first message of a command, after both ends proved the job token."""


class AskStatus(Message, frozen=True):
    """Request the status of the job. Answer: Status."""


class AskScale(Message, frozen=True):
    """Request that the job has `size` workers from now on. Answer: Accepted or Declined."""

    size: int


class AskDrain(Message, frozen=True):
    """Request that the workers of `host` leave at the next boundary, and that no further workers are started there.
    Answer: Accepted or Declined."""

    host: str


class AskUndrain(Message, frozen=True):
    """Request that `host` may be used again. Answer: Accepted or Declined."""

    host: str


class Subscribe(Message, frozen=True):
    """Request the events of the job: those that the coordinator still keeps, the oldest first, and then each new one.

    Answer: any number of EventRecord. Other requests on the same connection are answered as usual, in between.

    Attributes:
        epoch, after: The newest event that the client has; those before it are not sent again. Zeros: it has none.
    """

    epoch: int = 0
    after: int = 0


class AskStacks(Message, frozen=True):
    """Request the stacks of all threads of these workers now. Answer: a StacksOfWorker for each of them, in any order,
    within STACKS_S seconds. Other requests on the same connection are answered as usual, in between."""

    workers: tuple[str, ...]


STACKS_S = 10.0
"""Seconds within which each worker of an AskStacks is answered for."""

ClientMessage: TypeAlias = ClientHello | AskStatus | AskScale | AskDrain | AskUndrain | Subscribe | AskStacks


# Coordinator -> command -----------------------------------------------------------------------------------------------


class Accepted(Message, frozen=True):
    """The request is being carried out. `what` describes it; the Status shows its completion."""

    what: str


class Declined(Message, frozen=True):
    """The request cannot be carried out, and nothing has changed."""

    reason: str


class WorkerSummary(msgspec.Struct, frozen=True):
    """The state of one worker whose process is not known to be gone.

    Attributes:
        worker: Its name, which no other worker of the job ever has.
        rank: Its rank in the current generation; None if it is not a member.
        host: The name of its host.
        slot: Its slot on that host, from 0.
        pid: The id of its process on its host; 0 until it called init().
        state: Of a member "trains", "leaves", "has finished" or "fails"; of others "starts", "waits" (for its
            admission) or "ends".
        restarts_left: The number of times that it may still be replaced.
        step: Decided steps of a member (commits under the commit rule), at most some seconds old; None: unknown.
        telemetry: Its measurements, at most some seconds old; None: there are none.
    """

    worker: str
    rank: int | None
    host: str
    slot: int
    pid: int
    state: str
    restarts_left: int
    step: int | None = None
    telemetry: WorkerTelemetry | None = None


class HostStatus(msgspec.Struct, frozen=True):
    """The state of one host.

    Attributes:
        host: Its name.
        slots: The number of workers for which it has room.
        workers: The number of workers that run there.
        is_connected: Its agent is connected.
        is_drained: No workers are started there, by a user's request.
        failures: The number of times that lost workers have excluded it (--on-failure host).
        out_for_s: The remaining seconds of that exclusion; 0: it is not excluded. Infinite times are -1.
    """

    host: str
    slots: int
    workers: int
    is_connected: bool
    is_drained: bool = False
    failures: int = 0
    out_for_s: float = 0.0


class SlotInBackoff(msgspec.Struct, frozen=True):
    """A slot in which no worker is started for `for_s` more seconds.

    The reason is the number of workers in a row that failed there soon after their start.

    Attributes:
        host: The name of its host.
        slot: Its number on that host, from 0.
        failures: The number of those workers.
        for_s: The remaining seconds.
    """

    host: str
    slot: int
    failures: int
    for_s: float


class PastEvent(msgspec.Struct, frozen=True):
    """A line of the job's log, and its age.

    Attributes:
        ago_s: Its age in seconds.
        line: The text.
    """

    ago_s: float
    line: str


class Status(Message, frozen=True):
    """The state of a job at one moment.

    Attributes:
        job: The name of the job.
        state: "starting" (not all have called init() yet), "setup" (all have, and none has entered an elastic
            function), "training", "regrouping" (no worker trains), "finishing" or "ending".
        generation: The number of the generation that was started last; 0: none.
        change: The generation's number of a planned change in progress; 0: none.
        step: The newest step that the coordinator knows; None: none was reported.
        wanted: The number of workers that the job should have.
        spares: The number of newcomers that should wait beyond those (--spares).
        min_np, max_np: The fewest and the most workers; None: no limit.
        members: The members, by rank.
        newcomers: All other running workers.
        hosts: The hosts, in the order of their ranks.
        backoffs: Slots in which no worker is started for a while.
        regroups: The number of generations after the first one.
        events: The last events, the oldest first.
        coordinator_pid, coordinator_epoch: The coordinator's process, and its number: higher by 1 for each one that has
            taken over.
    """

    job: str
    state: str
    generation: int
    change: int
    step: int | None
    wanted: int
    spares: int
    min_np: int
    max_np: int | None
    members: tuple[WorkerSummary, ...]
    newcomers: tuple[WorkerSummary, ...]
    hosts: tuple[HostStatus, ...]
    backoffs: tuple[SlotInBackoff, ...]
    regroups: int
    events: tuple[PastEvent, ...] = ()
    coordinator_pid: int = 0
    coordinator_epoch: int = 1


class EventRecord(Message, frozen=True):
    """An event of the job (base/events/), for a client that has sent Subscribe.

    Attributes:
        epoch, number: The number of the event, counted from 1 by each coordinator, whose epoch is `epoch`.
        ago_s: Its age in seconds when this message was sent.
        level: "info" or "warning".
        line: Its text for people.
        fields: Its name, as "event", and its values, as in the file of --events. Long texts are cut.
    """

    epoch: int
    number: int
    ago_s: float
    level: str
    line: str
    fields: dict[str, str | int | float | bool | tuple[str, ...] | None]


class StacksOfWorker(Message, frozen=True):
    """The stacks of the threads of one worker.

    Attributes:
        worker: Its name.
        text: The stacks, as faulthandler writes them; empty: there are none.
        problem: Why there are none; empty: there are.
    """

    worker: str
    text: str
    problem: str = ""


ToClient: TypeAlias = Status | Accepted | Declined | EventRecord | StacksOfWorker


def is_scaled(status: Status, size: int) -> bool:
    """Return whether the job has reached `size` workers."""
    return status.state == "training" and not status.change and len(status.members) == size == status.wanted


def is_drained(status: Status, host: str) -> bool:
    """Return whether no worker is left on the host."""
    here = [each for each in status.hosts if each.host == host]
    return all(each.workers == 0 for each in here)
