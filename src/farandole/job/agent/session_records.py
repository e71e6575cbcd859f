"""An agent's knowledge of its workers, from the messages that it has carried in both directions: enough to tell a
coordinator that has lost its journal what the job is. Pure; used by coordinator_session.py.
"""

from __future__ import annotations

from typing import Any

import msgspec

from farandole.base.wire.link_messages import (
    Abort,
    Elastic,
    Failed,
    Finished,
    FirstStep,
    Hello,
    Leaving,
    Left,
    Newcomer,
    Prepare,
    Ready,
    Released,
    Start,
    Stop,
    Synced,
    ToWorker,
    WorkerMessage,
)
from farandole.base.wire.message import Message
from farandole.base.wire.messages import (
    AgentLeaving,
    ForwardToWorkers,
    FromWorker,
    Spawn,
    SpawnFailed,
    StartWorkers,
    ToldWorker,
    WorkerDying,
    WorkerExited,
    WorkerMet,
    WorkersTold,
)


class SessionRecords:
    """Note each message of a session, when it is sent or has come; `told()` sums them up."""

    def __init__(self) -> None:
        self._workers: dict[str, ToldWorker] = {}
        self._number = self._attempt = 0
        self._leaving = self._ending = ""

    def told(self, job_id: str) -> WorkersTold:
        """Return the message that tells all of it."""
        workers = tuple(self._workers.values())
        return WorkersTold(job_id, workers, self._number, self._attempt, self._leaving, self._ending)

    def note_sent(self, message: Message) -> None:
        """Note a message of the agent."""
        match message:
            case FromWorker(worker, payload):
                self._note_worker(worker, payload)
            case WorkerExited(worker) | SpawnFailed(worker):
                self._workers.pop(worker, None)
            case WorkerDying(worker):
                self._change(worker, is_dying=True)
            case WorkerMet(worker, True):
                self._change(worker, has_met=True)
            case AgentLeaving(reason):
                self._leaving = reason

    def note_received(self, message: Message) -> None:
        """Note an order of the coordinator."""
        match message:
            case Spawn(worker, slot, _, attempt):
                self._workers[worker] = ToldWorker(worker, slot)
                self._attempt = max(self._attempt, attempt)
            case ForwardToWorkers(workers, order):
                for worker in workers:
                    self._note_order(worker, order)
            case StartWorkers(starts):
                for worker, start in starts.items():
                    self._note_order(worker, start)

    def _note_worker(self, worker: str, message: WorkerMessage) -> None:
        match message:
            case Hello():
                self._change(worker, address=message.address, pid=message.pid, has_met=True)
            case Elastic():
                self._change(worker, is_elastic=True)
            case Ready(number):
                self._change(worker, ready=number)
            case Synced(number):
                self._change(worker, synced=number)
            case FirstStep():
                self._change(worker, stepped=message.number)
            case Finished(number, shortfall, static_because):
                self._change(worker, finished=number, shortfall=shortfall, static_because=static_because)
            case Leaving():
                self._change(worker, is_leaving=True)
            case Failed(summary):
                self._change(worker, raised=summary)

    def _note_order(self, worker: str, order: ToWorker) -> None:
        match order:
            case Newcomer():
                self._change(worker, is_newcomer=True)
            case Start(id, placement):
                self._number = max(self._number, id.number)
                self._change(worker, generation=id, rank=placement.rank, size=placement.size)
            case Abort(number) | Prepare(number):
                self._number = max(self._number, number)
                self._change(worker, announced=number)
            case Released(number):
                self._change(worker, released=number)
            case Left():
                self._change(worker, has_left=True)
            case Stop(reason):
                self._ending = reason

    def _change(self, worker: str, **fields: Any) -> None:
        if (known := self._workers.get(worker)) is not None:
            self._workers[worker] = msgspec.structs.replace(known, **fields)
