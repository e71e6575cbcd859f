"""The inputs of `decide`: everything that can happen to a job. The coordinator's shell creates them; those of users
are the messages of commands, once control_requests.py has accepted them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from farandole.base.wire.control import AskDrain, AskScale, AskUndrain
from farandole.base.wire.messages import AgentMessage


@dataclass(frozen=True)
class AgentConnected:
    """An agent proved the job token and offers `slots` slots on `host`. A lost one may come back, empty."""

    agent: str
    host: str
    slots: int


@dataclass(frozen=True)
class HostsOffered:
    """The hosts that the job may use from now on, with their slots; the workers of all other hosts must leave.

    may_change  other hosts may be offered later; else the offer is final

    Without this input the job uses whatever slots its agents offer.
    """

    slots: Mapping[str, int]
    may_change: bool


@dataclass(frozen=True)
class AgentLost:
    """The agent is lost for good, with all its workers.

    lease_end_s  until then, by the clock of `decide`, the workers may run unobserved; None: they are gone
    silent_s     how long the agent had been silent before
    """

    agent: str
    reason: str
    lease_end_s: float | None = None
    silent_s: float = 0.0


@dataclass(frozen=True)
class AgentReported:
    """A message of a connected agent. Messages of one agent arrive in the order it sent them."""

    agent: str
    message: AgentMessage


@dataclass(frozen=True)
class StopRequested:
    """A request to end the job: first with grace, then `now`."""

    now: bool
    reason: str


@dataclass(frozen=True)
class StepsStalled:
    """No member has made progress for `stalled_s`; `number` was the highest announced generation all the time.

    step         decided steps
    in_own_code  members whose main thread is in the script's code; the others wait for a peer
    """

    number: int
    stalled_s: float
    step: int
    in_own_code: tuple[str, ...]
    waiting: tuple[str, ...]


@dataclass(frozen=True)
class StepsSeen:
    """The number of steps (or commits, where steps are not counted) that were decided when the workers were last seen.
    Sent before a loss, so that a job that has lost its state can report how far it goes back."""

    step: int


@dataclass(frozen=True)
class Tick:
    """No event, but `next_deadline` has passed."""


Input: TypeAlias = (
    HostsOffered
    | AgentConnected
    | AgentLost
    | AgentReported
    | StopRequested
    | AskScale
    | AskDrain
    | AskUndrain
    | StepsStalled
    | StepsSeen
    | Tick
)
