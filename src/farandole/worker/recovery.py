"""What a survivor does between the end of one generation and the first step of the next.

Read from top to bottom: `regroup` is the path of docs/when-a-worker-dies.md on the worker's side.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from farandole.clock import now_s
from farandole.collectives.transport import Transport
from farandole.errors import RecoverableError
from farandole.messages import Synced
from farandole.state.sync import SyncReport
from farandole.worker.job import Job

Agree = Callable[[Transport, bool], SyncReport | None]
"""agree(transport, founding): makes the state the same everywhere; None where the state does not say how."""

logger = logging.getLogger("farandole")


@dataclass(frozen=True)
class Regrouped:
    """How one regroup went on this worker; times in seconds."""

    number: int
    rank: int
    size: int
    report: SyncReport | None
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


def regroup(job: Job, agree: Agree) -> Regrouped:
    """Move to the next generation: READY, START, new transport, same state everywhere.

    Called by the main thread, which is in no collective therefore; what other threads have in flight is ended
    first. The state that `agree` copies must be that of the last boundary. Returns once this worker is a member
    whose state equals everybody's. Any further fault on the way leads to one more generation. Raises JobEnded when
    the job is over, SystemExit when this worker has left it.
    """
    while True:
        begin = now_s()
        job.quiesce()
        start = job.wait_for_start()
        started = now_s()
        try:
            transport = job.build(start)
            built = now_s()
            report = agree(transport, start.founding)
        except RecoverableError:
            job.link.wait_for_abort(above=start.id.number)
            continue
        job.link.send(Synced(start.id.number))
        job.settle()
        return Regrouped(
            number=start.id.number,
            rank=start.placement.rank,
            size=start.placement.size,
            report=report,
            waited_s=started - begin,
            built_s=built - started,
            synced_s=now_s() - built,
        )
