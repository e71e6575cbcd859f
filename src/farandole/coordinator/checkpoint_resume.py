"""Resume from the newest checkpoint after all holders of the state are lost: newcomers read it, as at a job's start.

A new run id begins, so that no checkpoint of the old one is mistaken for it (protocol, rule 4). The next generation is
a bootstrap: rank 0 reads the checkpoint, and the others copy its state.
"""

from __future__ import annotations

from farandole.coordinator.job import Job
from farandole.coordinator.transition import Transition
from farandole.events import StateLost


def is_state_lost(job: Job) -> bool:
    return job.was_synced and not any(worker.synced for worker in job.survivors())


def resume(transition: Transition) -> None:
    """Reset the job's progress to "no state". Only for a job with a checkpoint."""
    job = transition.job
    transition.change(run_id=job.run_id + 1, was_synced=False, is_finishing=False, lost_at=job.steps_seen, steps_seen=0)
    transition.log(StateLost(job.run_id + 1, "; ".join(loss.sentence for loss in job.losses)))
