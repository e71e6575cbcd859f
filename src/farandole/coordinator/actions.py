"""What the coordinator's shell has to do: the answers of `decide`, to be carried out in this order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from farandole.events import Event
from farandole.messages import ToAgent


@dataclass(frozen=True)
class SendAgent:
    """Send `message` to a connected agent. To one agent, messages must arrive in the order of the actions."""

    agent: str
    message: ToAgent


@dataclass(frozen=True)
class EndJob:
    """The last action of a job. `reason` is for a person; `exit_code` is that of `farandole run`."""

    exit_code: int
    reason: str


@dataclass(frozen=True)
class Log:
    """Something worth logging."""

    event: Event


Action: TypeAlias = SendAgent | EndJob | Log
