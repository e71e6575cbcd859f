"""The actions that `decide` returns. The coordinator's shell carries them out in this order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from farandole.events import Event
from farandole.messages import ToAgent


@dataclass(frozen=True)
class SendAgent:
    """Send `message` to a connected agent. Messages to one agent must arrive in the order of the actions."""

    agent: str
    message: ToAgent


@dataclass(frozen=True)
class EndJob:
    """The last action of a job. `reason` is for people; `exit_code` is the exit code of `farandole run`."""

    exit_code: int
    reason: str


@dataclass(frozen=True)
class Log:
    """Log an event."""

    event: Event


Action: TypeAlias = SendAgent | EndJob | Log
