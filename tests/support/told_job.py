"""A coordinator's job that a test feeds with one input after another, and whose decisions it then queries."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from farandole.base.config import JobConfig
from farandole.base.events.event import Event
from farandole.base.membership import DataAddress, Origin, Shortfall
from farandole.base.wire.link_messages import (
    Elastic,
    Failed,
    Finished,
    FirstStep,
    Hello,
    LinkBroken,
    Ready,
    Start,
    Synced,
    WorkerMessage,
)
from farandole.base.wire.message import PROTOCOL_VERSION
from farandole.base.wire.messages import ForwardToWorkers, FromWorker, Spawn, StartWorkers, ToAgent, WorkerExited
from farandole.job.coordinator.decide import decide, next_deadline
from farandole.job.coordinator.job import new_job
from farandole.job.coordinator.transition import (
    Action,
    AgentConnected,
    AgentReported,
    HostsOffered,
    Input,
    Log,
    Outcome,
    SendAgent,
    Tick,
)
from tests.support.membership_invariants import MembershipInvariants

MessageT = TypeVar("MessageT", bound=ToAgent)
EventT = TypeVar("EventT", bound=Event)


class ToldJob:
    """A job with one host, agent "a", unless more are connected. `actions` are those of the last input.

    Lost workers are replaced at once, unless the test sets `deferred_restart_s`. Every decision is also checked against
    the membership invariants.
    """

    def __init__(
        self,
        num_proc: int = 3,
        slots: int | None = None,
        origin: Origin | None = None,
        first_hosts: Mapping[str, int] = MappingProxyType({}),
        **config: Any,
    ) -> None:
        self.config = JobConfig(num_proc, **{"deferred_restart_s": 0.0, **config})
        self.job = new_job(self.config, "job", origin=origin, first_hosts=first_hosts)
        self.now_s = 100.0
        self.actions: list[Action] = []
        self._invariants = MembershipInvariants(self.config)
        if slots != 0:
            self.connect("a", slots or num_proc)

    # Inputs ----------------------------------------------------------------------------------------------

    def feed(self, *happened: Input) -> ToldJob:
        """Decide on inputs that arrive together."""
        self.job, self.actions = decide(self.job, happened, self.now_s)
        self._invariants.watch(happened, self.actions, self.now_s)
        return self

    def connect(self, agent: str, slots: int, host: str | None = None) -> ToldJob:
        return self.feed(AgentConnected(agent, host or f"host-{agent}", slots))

    def offer(self, may_change: bool = True, **slots: int) -> ToldJob:
        """Offer these hosts, with their slots; hosts without an agent get one that has their name."""
        self.feed_hosts(may_change, **slots)
        actions = self.actions
        for host, count in slots.items():
            if not (host in self.job.agents and self.job.agents[host].is_connected):
                self.connect(host, count, host)
                actions = [*actions, *self.actions]
        self.actions = actions
        return self

    def feed_hosts(self, may_change: bool = True, **slots: int) -> ToldJob:
        """Offer these hosts, with their slots; their agents are still to come."""
        return self.feed(HostsOffered(slots, may_change))

    def says(self, worker: str, message: WorkerMessage) -> ToldJob:
        agent = self.job.workers[worker].slot.agent if worker in self.job.workers else "a"
        return self.feed(AgentReported(agent, FromWorker(worker, message)))

    def hello(self, *workers: str) -> ToldJob:
        for worker in workers:
            address = DataAddress("127.0.0.1", 20000 + int(worker[1:]))
            self.says(worker, Hello(worker, "", 1, PROTOCOL_VERSION, address))
        return self

    def elastic(self, *workers: str) -> ToldJob:
        for worker in workers:
            self.says(worker, Elastic())
        return self

    def synced(self, *workers: str) -> ToldJob:
        for worker in workers:
            self.says(worker, Synced(self.number))
        return self

    def ready(self, number: int, *workers: str) -> ToldJob:
        for worker in workers:
            self.says(worker, Ready(number))
        return self

    def stepped(self, *workers: str, **said: float | str) -> ToldJob:
        """Report the first step of these workers in the generation. `said`: as in FirstStep, else zeros."""
        durations = dict.fromkeys(("ready_s", "waited_s", "connected_s", "synced_s", "stepped_s"), 0.0)
        redone = {"steps_redone": 0, "samples_redone": 0}
        for worker in workers:
            self.says(worker, msgspec.convert({**durations, **redone, **said, "number": self.number}, FirstStep))
        return self

    def finished(self, *workers: str, shortfall: Shortfall | None = None, static_because: str = "") -> ToldJob:
        for worker in workers:
            self.says(worker, Finished(self.number, shortfall, static_because))
        return self

    def raised(self, worker: str, summary: str, exits: bool = True) -> ToldJob:
        self.says(worker, Failed(summary, f"Traceback\n{summary}"))
        return self.exited(worker, 1) if exits else self

    def link_broken(self, reporter: str, peer: str) -> ToldJob:
        return self.says(reporter, LinkBroken(self.number, peer, "receive", "end of file"))

    def exited(self, worker: str, exit_code: int = -9) -> ToldJob:
        agent = self.job.workers[worker].slot.agent if worker in self.job.workers else "a"
        return self.feed(AgentReported(agent, WorkerExited(worker, exit_code)))

    def passes(self, seconds: float) -> ToldJob:
        """Let time pass, with a Tick at the end."""
        self.now_s += seconds
        return self.feed(Tick())

    def training(self) -> ToldJob:
        """All initial workers call init(), enter the elastic function and confirm their state."""
        workers = tuple(self.job.workers)
        return self.hello(*workers).elastic(*workers).synced(*workers)

    # Decisions -------------------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """The number of the generation that was started last."""
        return self.job.generation.number if self.job.generation else 0

    @property
    def members(self) -> tuple[str, ...]:
        """The members of the generation that was started last, by rank."""
        return self.job.generation.members if self.job.generation else ()

    @property
    def deadline_in_s(self) -> float | None:
        deadline_s = next_deadline(self.job)
        return None if deadline_s is None else deadline_s - self.now_s

    def sent(self, kind: type[MessageT]) -> list[MessageT]:
        """Return the messages of one kind to agents."""
        sent = (action.message for action in self.actions if isinstance(action, SendAgent))
        return [message for message in sent if isinstance(message, kind)]

    def told(self) -> dict[str, list[str]]:
        """Return the names of the messages to workers, by worker."""
        told: dict[str, list[str]] = {}
        for message in self.sent(ForwardToWorkers):
            for worker in message.workers:
                told.setdefault(worker, []).append(type(message.message).__name__)
        return told

    def starts(self) -> dict[str, Start]:
        """Return the START messages, by worker."""
        return {name: start for message in self.sent(StartWorkers) for name, start in message.starts.items()}

    def spawned(self) -> dict[str, int]:
        """Return the slots of the workers that were started."""
        return {message.worker: message.slot for message in self.sent(Spawn)}

    def logged(self, kind: type[EventT]) -> list[EventT]:
        events = (action.event for action in self.actions if isinstance(action, Log))
        return [event for event in events if isinstance(event, kind)]

    @property
    def ending(self) -> tuple[int, str]:
        """The exit code and the reason, once it is decided that the job ends."""
        assert self.job.ending is not None, "the job goes on"
        return self.job.ending.exit_code, self.job.ending.reason

    @property
    def end(self) -> Outcome | None:
        return next((action for action in self.actions if isinstance(action, Outcome)), None)
