"""The barrier at the end of an elastic function, which both run loops pass."""

from __future__ import annotations

import logging
from contextlib import suppress

from farandole.base.events.job_events import TrainingCutShort
from farandole.base.liveness.status_reporting import InPhase
from farandole.base.membership import Phase, Shortfall
from farandole.base.wire.link_messages import Finished
from farandole.errors import CollectiveMismatch, RecoverableError
from farandole.training.collectives import world
from farandole.training.collectives.agreement import LEAVE_TOGETHER
from farandole.training.collectives.world import World
from farandole.training.worker.worker_job import WorkerJob

logger = logging.getLogger("farandole")


def all_have_finished(job: WorkerJob | None, shortfall: Shortfall | None = None, static_because: str = "") -> bool:
    """Wait until the function has returned on every worker. Return False when a worker was lost before all had passed;
    regroup and call again, since the others may need this worker in the collectives of the function's last lines.

    shortfall  the part of its loader's promised work that the function did not do; for the job's report
    static_because  as in Finished
    """
    here = world.current()
    if job is None:
        _meet_at_end(here)
        if shortfall is not None and here.placement.rank == 0:  # there is no coordinator to report it
            logger.warning(TrainingCutShort.of(shortfall).line())
        return True
    with InPhase(Phase.FINISHED):
        job.link.send(Finished(here.id.number, shortfall, static_because))
        with suppress(RecoverableError):  # the coordinator's order says what to do
            _meet_at_end(here)
        job.has_finished = job.link.wait_for_release(here.id.number)
    return job.has_finished


def _meet_at_end(here: World) -> None:
    """Meet all workers at the end of the function. Raises CollectiveMismatch, on all of them, when another one waits
    for this one in a collective within the function: both would wait for ever."""
    ends = [each.begin_end() for each in here.extensions.values()]
    try:
        here.transport.barrier()
    except CollectiveMismatch as error:
        raise CollectiveMismatch(
            f"this worker has left the elastic function, and another one has not ({error}): {LEAVE_TOGETHER}"
        ) from error
    except RecoverableError:
        for each in ends:
            each.take()  # raises the mismatch that has made the other worker leave
        raise
    for each in ends:
        each.take()
