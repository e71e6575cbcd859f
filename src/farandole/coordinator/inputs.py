"""What can happen to a job: the inputs of `decide`. The coordinator's shell makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from farandole.messages import AgentMessage


@dataclass(frozen=True)
class AgentConnected:
    """An agent proved the job token and offers `slots` slots on `host`. A lost one may come back, empty."""

    agent: str
    host: str
    slots: int


@dataclass(frozen=True)
class HostsOffered:
    """These are the hosts that the job may use from now on, with their slots; all others have to be left.

    may_change  other hosts may be offered later; else these are all that there will ever be

    Without this input the job uses whatever slots its agents offer.
    """

    slots: Mapping[str, int]
    may_change: bool


@dataclass(frozen=True)
class AgentLost:
    """The agent is gone for good, and all its workers with it.

    lease_end_s  until then, by the clock of `decide`, they may go on where nobody sees them; None: they are gone
    silent_s     how long nothing was heard of it before
    """

    agent: str
    reason: str
    lease_end_s: float | None = None
    silent_s: float = 0.0


@dataclass(frozen=True)
class AgentTold:
    """A message of a connected agent. Messages of one agent arrive in the order it sent them."""

    agent: str
    message: AgentMessage


@dataclass(frozen=True)
class StopRequested:
    """A person wants the job to end: first with grace, then `now`."""

    now: bool
    reason: str


@dataclass(frozen=True)
class ScaleRequested:
    """From now on the job should have `size` workers."""

    size: int


@dataclass(frozen=True)
class DrainRequested:
    """The workers of the host should leave at the next boundary, and nothing be started there any more."""

    host: str
    reason: str


@dataclass(frozen=True)
class UndrainRequested:
    """The host may be used again."""

    host: str


@dataclass(frozen=True)
class StepsStalled:
    """Nothing has moved on any member for `stalled_s`; `number` was the highest announced generation all the time.

    step         decided steps
    in_own_code  members whose main thread is in the script's code; the others wait for someone
    """

    number: int
    stalled_s: float
    step: int
    in_own_code: tuple[str, ...]
    waiting: tuple[str, ...]


@dataclass(frozen=True)
class StepsSeen:
    """So many steps (or commits, where steps are not counted) were decided when the workers were seen last. Told
    before a loss, so that it can be said how far a job goes back that has lost its state."""

    step: int


@dataclass(frozen=True)
class Tick:
    """Nothing happened, but `next_deadline` has passed."""


Input: TypeAlias = (
    HostsOffered
    | AgentConnected
    | AgentLost
    | AgentTold
    | StopRequested
    | ScaleRequested
    | DrainRequested
    | UndrainRequested
    | StepsStalled
    | StepsSeen
    | Tick
)
