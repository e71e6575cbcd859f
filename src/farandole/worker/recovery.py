"""What a survivor does between the end of one generation and the first step of the next.

Read from top to bottom: `regroup` is the path of docs/when-a-worker-dies.md on the worker's side.
"""

from __future__ import annotations

from dataclasses import dataclass

from farandole.clock import now_s
from farandole.errors import RecoverableError
from farandole.messages import Ready, Start, Synced
from farandole.state.sync import SyncReport, synchronize
from farandole.state.torch_state import TorchState
from farandole.worker.job import Job


@dataclass(frozen=True)
class Regrouped:
    """How one regroup went on this worker; times in seconds."""

    number: int
    size: int
    report: SyncReport
    waited_s: float  # from READY to START: the others, and the coordinator
    built_s: float  # data connections
    synced_s: float  # progress compared, state copied


def regroup(job: Job, state: TorchState) -> Regrouped:
    """Move to the next generation: READY, START, new transport, same state everywhere.

    Called by the main thread only, so nothing of the old generation runs any more. The state must be that of
    the last boundary (state.capture() was called). Returns once this worker is a member whose state equals
    everybody's. Any further fault on the way leads to one more generation. Raises JobEnded when the job is
    over, SystemExit when this worker has left it.
    """
    while True:
        begin = now_s()
        start = _wait_for_start(job)
        started = now_s()
        try:
            transport = job.build(start)
            built = now_s()
            report = synchronize(state, transport, start.founding)
        except RecoverableError:
            job.link.wait_for_abort(above=start.id.number)
            continue
        job.link.send(Synced(start.id.number))
        job.settle()
        if state.loader is not None:
            state.loader.set_world(start.placement.rank, start.placement.size)
        return Regrouped(
            number=start.id.number,
            size=start.placement.size,
            report=report,
            waited_s=started - begin,
            built_s=built - started,
            synced_s=now_s() - built,
        )


def _wait_for_start(job: Job) -> Start:
    """Say READY for the newest order, and again whenever a further change replaces it, until START."""
    number = job.demanded_number()
    while True:
        if number:
            job.link.send(Ready(number))
        answer = job.link.wait_for_start(above=number)
        if isinstance(answer, Start):
            return answer
        number = answer
