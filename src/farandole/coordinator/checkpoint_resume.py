"""All who held the state are lost, and the job lives: newcomers go on from the newest checkpoint, as at a job's start.

A new run id begins, so that nothing of the old one is mistaken for it (protocol, rule 4). The next generation
is a bootstrap one: whoever gets rank 0 reads the checkpoint, and the others copy it from there.
"""

from __future__ import annotations

from farandole.coordinator.job import Job
from farandole.coordinator.transition import Transition
from farandole.events import StateLost


def is_state_lost(job: Job) -> bool:
    return job.was_synced and not any(worker.synced for worker in job.survivors())


def resume(transition: Transition) -> None:
    """Forget that there was a state; only for a job with a checkpoint."""
    job = transition.job
    transition.change(run_id=job.run_id + 1, was_synced=False, is_finishing=False, lost_at=job.steps_seen, steps_seen=0)
    transition.log(StateLost(job.run_id + 1, "; ".join(loss.sentence for loss in job.losses)))
