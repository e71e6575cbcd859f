"""What a person's command and the coordinator say to each other: requests, answers, and the status of a job.

They travel on the same authenticated connection as an agent's words; the first message says which of the two has
dialed. coordinator/status.py makes a Status, coordinator/clients.py answers, launch/control_commands.py asks.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from farandole.messages import Message

# Command -> coordinator ------------------------------------------------------------------------------


class ClientHello(Message, frozen=True):
    """First message of a command, after both ends proved the job token."""

    version: int


class AskStatus(Message, frozen=True):
    """How is the job? Answer: Status."""


class AskScale(Message, frozen=True):
    """The job should have `size` workers from now on. Answer: Accepted or Declined."""

    size: int


class AskDrain(Message, frozen=True):
    """The workers of `host` should leave at the next boundary, and nothing be started there any more.
    Answer: Accepted or Declined."""

    host: str


class AskUndrain(Message, frozen=True):
    """`host` may be used again. Answer: Accepted or Declined."""

    host: str


ClientMessage: TypeAlias = ClientHello | AskStatus | AskScale | AskDrain | AskUndrain


# Coordinator -> command ------------------------------------------------------------------------------


class Accepted(Message, frozen=True):
    """It is being done. `what` says so in words; the Status shows when it is."""

    what: str


class Declined(Message, frozen=True):
    """It cannot be done, and nothing has changed."""

    reason: str


class WorkerStatus(msgspec.Struct, frozen=True):
    """One worker whose process is not known to be gone.

    rank           in the current generation; None for one that is no member
    pid            of its process on its host; 0 until it called init()
    state          "trains", "leaves", "has finished", "fails"; of one that is no member "starts", "waits" (for its
                   admission), "ends"
    restarts_left  how often it may still be replaced
    step           decided steps of a member (commits under the commit rule), not older than some seconds; None: unseen
    """

    worker: str
    rank: int | None
    host: str
    slot: int
    pid: int
    state: str
    restarts_left: int
    step: int | None = None


class HostStatus(msgspec.Struct, frozen=True):
    """One host.

    slots           room for so many workers
    workers         so many run there
    is_connected    its agent is there
    is_drained      nothing is started there, because somebody wanted so
    failures        how often workers lost there have taken it out (--on-failure host)
    out_for_s       so long nothing is started there for that; 0: it is in. Infinite times are -1
    """

    host: str
    slots: int
    workers: int
    is_connected: bool
    is_drained: bool = False
    failures: int = 0
    out_for_s: float = 0.0


class SlotInBackoff(msgspec.Struct, frozen=True):
    """A slot that nothing is started in for `for_s` seconds more, since so many workers in a row failed there soon
    after their start."""

    host: str
    slot: int
    failures: int
    for_s: float


class PastEvent(msgspec.Struct, frozen=True):
    """What was said in the job's log, and how long ago."""

    ago_s: float
    line: str


class Status(Message, frozen=True):
    """How a job is, at one moment.

    state       "starting" (not all have called init() yet), "training", "regrouping" (nobody trains), "finishing",
                "ending"
    generation  the number of the one that was started last; 0: none
    change      a planned change that is under way: its generation's number; 0: none
    step        the newest step that the coordinator has heard of; None: it was told of none
    wanted      workers that the job should have
    spares      newcomers that should wait beyond those (--spares)
    min_np, max_np   fewest and most workers; None: no limit
    members     by rank; newcomers: all others that run
    regroups    generations after the first one
    events      the last ones, the oldest first
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
    members: tuple[WorkerStatus, ...]
    newcomers: tuple[WorkerStatus, ...]
    hosts: tuple[HostStatus, ...]
    backoffs: tuple[SlotInBackoff, ...]
    regroups: int
    events: tuple[PastEvent, ...] = ()


ToClient: TypeAlias = Status | Accepted | Declined


def is_scaled(status: Status, size: int) -> bool:
    """Whether the job has come to have `size` workers."""
    return status.state == "training" and not status.change and len(status.members) == size == status.wanted


def is_drained(status: Status, host: str) -> bool:
    """Whether no worker is left on the host."""
    here = [each for each in status.hosts if each.host == host]
    return all(each.workers == 0 for each in here)
