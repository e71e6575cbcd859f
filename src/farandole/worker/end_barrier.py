"""The barrier at the end of an elastic function. Both run loops pass it."""

from __future__ import annotations

import logging

from farandole.collectives import world
from farandole.events import TrainingCutShort
from farandole.membership import Shortfall
from farandole.messages import Finished
from farandole.status_reporting import InPhase
from farandole.worker.worker_job import Job
from farandole.worker_status import Phase

logger = logging.getLogger("farandole")


def all_have_finished(job: Job | None, shortfall: Shortfall | None = None) -> bool:
    """Wait until the function has returned on every worker. Return False when a worker was lost before all had passed;
    regroup and call again, since the others may need this worker in the collectives of the function's last lines.

    shortfall  the part of its loader's promised work that the function did not do; for the job's report
    """
    here = world.current()
    if job is None:
        here.transport.barrier()
        if shortfall is not None and here.placement.rank == 0:  # there is no coordinator to report it
            logger.warning(TrainingCutShort.of(shortfall).line())
        return True
    with InPhase(Phase.FINISHED):
        job.link.send(Finished(here.id.number, shortfall))
        job.has_finished = job.link.wait_for_release(here.id.number)
    return job.has_finished
