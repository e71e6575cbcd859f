"""A transition of the job: its new state, and the actions that the coordinator's shell carries out, in this order.
Pure.

A decision in progress: the job so far, and the actions that it requires. A Transition exists only inside one `decide`.

The job that a decision begins with, and the one that it ends with, are never changed. In between, the mappings of
workers and slots belong to the transition: it copies each of them once, before the first change, so that a further
change costs the same in a job of any size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from farandole.base.events.event import Event
from farandole.base.events.job_events import JobEnds
from farandole.base.wire.link_messages import Stop, ToWorker
from farandole.base.wire.messages import ForwardToWorkers, Kill, ToAgent
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
class EndJob:
    """The last action of a job. `reason` is for people; `exit_code` is the exit code of `farandole run`."""

    exit_code: int
    reason: str


@dataclass(frozen=True)
class Log:
    """Log an event."""

    event: Event


Action: TypeAlias = SendAgent | EndJob | Log
