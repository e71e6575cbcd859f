"""What goes into a decision, and what comes out of it: the inputs of `decide`, which are all that can happen to a job;
a transition of the job; and the actions that the coordinator's shell carries out, in this order. Pure.

A Transition is a decision in progress: the job so far, and the actions that it requires. The job that a decision begins
with, and the one that it ends with, are never changed. In between, the mappings of workers and slots belong to the
transition: it copies each of them once, before the first change, so that a further change costs the same in a job of
any size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from farandole.base.events.event import Event
from farandole.base.events.job_events import JobEnds
from farandole.base.wire.control import AskDrain, AskScale, AskUndrain
from farandole.base.wire.link_messages import Stop, ToWorker
from farandole.base.wire.messages import AgentMessage, ForwardToWorkers, Kill, ToAgent
from farandole.job.coordinator.job import Ending, Job, Slot, SlotUse, Worker

# After a worker's SIGKILL the kernel may need seconds to tear gigabytes of memory down.
REAP_S = 5.0


class Transition:
    """The changed job and the actions. Rules read `job`, replace fields, and append to `actions`; nothing else is
    touched."""

    def __init__(self, job: Job, now_s: float) -> None:
        self.job = job
        self.now_s = now_s
        self.actions: list[Action] = []
        self.faults: list[str] = []  # sentences: the members must regroup because of them
        self._own: dict[Literal["workers", "slots"], dict[Any, Any]] = {}

    def change(self, **fields: Any) -> None:
        """Replace fields of the job."""
        if any(getattr(self.job, name) is not value for name, value in fields.items()):
            self.job = replace(self.job, **fields)

    def add_worker(self, worker: Worker) -> None:
        self._of_this_transition("workers")[worker.name] = worker

    def change_worker(self, name: str, **fields: Any) -> None:
        self._of_this_transition("workers")[name] = replace(self.job.workers[name], **fields)

    def change_agent(self, name: str, **fields: Any) -> None:
        self.change(agents={**self.job.agents, name: replace(self.job.agents[name], **fields)})

    def open_slot(self, slot: Slot, restarts: int) -> None:
        """Open a slot: the job wants a worker there."""
        self._of_this_transition("slots")[slot] = SlotUse(restarts=restarts)

    def change_slot(self, slot: Slot, **fields: Any) -> None:
        self._of_this_transition("slots")[slot] = replace(self.job.slots[slot], **fields)

    def forget(self, names: Iterable[str]) -> None:
        """Remove workers whose processes are gone."""
        gone = list(names)
        workers = self._of_this_transition("workers")
        for name in gone:
            workers.pop(name, None)

    def _of_this_transition(self, name: Literal["workers", "slots"]) -> dict[Any, Any]:
        """Return a mapping of the job that may be changed in place."""
        own = self._own.get(name)
        if own is None or getattr(self.job, name) is not own:
            own = self._own[name] = dict(getattr(self.job, name))
            self.change(**{name: own})
        return own

    def send(self, agent: str, message: ToAgent) -> None:
        self.actions.append(SendAgent(agent, message))

    def send_to_workers(self, names: Iterable[str], message: ToWorker) -> None:
        """Send the same message to several workers, in one message for each agent."""
        by_agent: defaultdict[str, list[str]] = defaultdict(list)
        for name in names:
            by_agent[self.job.workers[name].slot.agent].append(name)
        for agent, workers in by_agent.items():
            self.send(agent, ForwardToWorkers(tuple(workers), message))

    def kill(self, name: str, grace_s: float, reason: str, dumps_stacks: bool = False) -> None:
        """Have a worker's process ended. Its exit is reported like any other, with `dumps_stacks` together with the
        stacks of its threads."""
        self.send(self.job.workers[name].slot.agent, Kill(name, grace_s, reason, dumps_stacks))
        self.change_worker(name, killed_for=reason, kill_at_s=None)

    def log(self, event: Event) -> None:
        self.actions.append(Log(event))

    def end(self, exit_code: int, reason: str, grace_s: float | None = None, dumps_stacks: bool = False) -> None:
        """End the job: stop all workers; `shutdown.py` waits for the exits. The first reason counts."""
        if self.job.ending is not None:
            return
        grace_s = self.job.config.grace_s if grace_s is None else grace_s
        self.log(JobEnds(exit_code, reason))
        self.change(ending=Ending(exit_code, reason, self.now_s + grace_s + REAP_S))
        # The emergency checkpoint is written by the survivor of the lowest rank that holds the state and was not itself
        # asked to end.
        fit = [w.name for w in self.job.each_survivor() if w.synced and w.raised is None and not w.killed_for]
        writers = fit[:1] if self.job.saves else []
        listening = [name for name, worker in self.job.workers.items() if worker.address]
        self.send_to_workers((name for name in listening if name not in writers), Stop(reason))
        self.send_to_workers(writers, Stop(reason, saves=True))
        for name in self.job.workers:
            self.kill(name, grace_s, "the job ends", dumps_stacks)


# The actions that `decide` returns, which the coordinator's shell carries out in this order ---------------------------


@dataclass(frozen=True)
class SendAgent:
    """Send `message` to a connected agent. Messages to one agent must arrive in the order of the actions."""

    agent: str
    message: ToAgent


@dataclass(frozen=True)
class Outcome:
    """The last action of a job: its result. `reason` is for people; `exit_code` is the exit code of `farandole run`."""

    exit_code: int
    reason: str


@dataclass(frozen=True)
class Log:
    """Log an event."""

    event: Event


Action: TypeAlias = SendAgent | Outcome | Log


# The inputs of `decide`, which the coordinator's shell creates; those of users are the messages of commands, once
# control_requests.py has accepted them -------------------------------------------------------------------------------


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
