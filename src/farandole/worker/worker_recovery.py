"""The recovery of a survivor, between the end of one generation and the first step of the next.

Read from top to bottom: `regroup` is the path of docs/when-a-worker-dies.md on the worker's side.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from farandole.clock import now_s
from farandole.collectives.transport import Transport
from farandole.errors import RecoverableError
from farandole.liveness.status_reporting import InPhase
from farandole.membership import Phase
from farandole.state import step
from farandole.state.sync import SyncReport
from farandole.wire.messages import FirstStep, Start, Synced
from farandole.worker.worker_job import WorkerJob

Agree = Callable[[Transport, bool], SyncReport | None]
"""agree(transport, bootstrap): makes the state the same on all members; None where the state does not report how."""

logger = logging.getLogger("farandole")


@dataclass(frozen=True)
class Regrouped:
    """The course of one regroup on this worker; times in seconds."""

    number: int
    rank: int
    size: int
    report: SyncReport | None
    ready_s: float  # from the ABORT to READY; 0 for a planned change
    waited_s: float  # from READY to START: the others, and the coordinator
    built_s: float  # data connections
    synced_s: float  # progress compared, state copied

    def log(self, position: str) -> None:
        logger.info(
            "generation %d with %d workers, %s: waited %.1f ms, connected %.1f ms, synced %.1f ms",
            self.number,
            self.size,
            position,
            self.waited_s * 1e3,
            self.built_s * 1e3,
            self.synced_s * 1e3,
        )


@dataclass(frozen=True)
class Connection:
    """A connection to the members of a new generation; their states are not compared yet.

    Times in seconds, as in Regrouped.
    """

    start: Start
    transport: Transport
    ready_s: float
    waited_s: float
    built_s: float


def connect(job: WorkerJob) -> Connection:
    """Leave the generation that has ended, and connect to the members of the next one: READY, START, new transport.

    Called by the main thread, which is in no collective therefore; the operations of other threads are ended first. A
    further fault leads to one more generation. Raises JobEnded when the job is over, SystemExit when this worker has
    left it.
    """
    while True:
        job.quiesce()
        start = job.wait_for_start()
        started = now_s()
        try:
            transport = job.build(start)
        except RecoverableError:
            job.link.wait_for_abort(above=start.id.number)
            continue
        ready_s = max(0.0, job.ready_s - job.link.aborted_s) if job.link.ordered >= start.id.number else 0.0
        return Connection(start, transport, ready_s, started - job.ready_s, now_s() - started)


def regroup(job: WorkerJob, agree: Agree, connection: Connection | None = None) -> Regrouped:
    """Move to the next generation: connect, and make the state the same on all members.

    The state that `agree` copies must be that of the last boundary. Returns once this worker is a member whose state
    equals that of all others. Any further fault leads to one more generation. Raises what connect() raises.

    connection  the connection that was made already, in the middle of a loop body
    """
    with InPhase(Phase.REGROUPING):
        while True:
            connection = connection or connect(job)
            start, agreeing_s = connection.start, now_s()
            try:
                report = agree(connection.transport, start.bootstrap)
            except RecoverableError:
                job.link.wait_for_abort(above=start.id.number)
                connection = None
                continue
            job.link.send(Synced(start.id.number))
            job.settle()
            return Regrouped(
                number=start.id.number,
                rank=start.placement.rank,
                size=start.placement.size,
                report=report,
                ready_s=connection.ready_s,
                waited_s=connection.waited_s,
                built_s=connection.built_s,
                synced_s=now_s() - agreeing_s,
            )


def report_first_step(
    job: WorkerJob,
    done: Regrouped,
    began_at: int,
    counts: Literal["step", "commit"],
    steps_redone: int = 0,
    samples_redone: int = 0,
) -> None:
    """Report to the coordinator when the first step after this regroup is decided here, with its cost. Arguments as in
    FirstStep."""
    synced_s = now_s()

    def decided() -> None:
        job.link.send(
            FirstStep(
                done.number,
                ready_s=done.ready_s,
                waited_s=done.waited_s,
                connected_s=done.built_s,
                synced_s=done.synced_s,
                stepped_s=now_s() - synced_s,
                steps_redone=steps_redone,
                samples_redone=samples_redone,
                counts=counts,
                began_at=began_at,
            )
        )

    step.when_next_decided(decided)
