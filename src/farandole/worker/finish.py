"""The barrier at the end of an elastic function. Both run loops pass it."""

from __future__ import annotations

from farandole.collectives import world
from farandole.messages import Finished
from farandole.sighting import Phase
from farandole.whereabouts import In
from farandole.worker.job import Job


def all_have_finished(job: Job | None) -> bool:
    """Wait until the function has returned on every worker. False: somebody was lost before everybody was through;
    regroup and call again, since the others may need this worker in the collectives of the function's last lines."""
    here = world.current()
    if job is None:
        here.transport.barrier()
        return True
    with In(Phase.FINISHED):
        job.link.send(Finished(here.id.number))
        job.has_finished = job.link.wait_for_release(here.id.number)
    return job.has_finished
