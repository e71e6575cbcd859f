"""What a worker reports at a boundary: where it is, and the workers that have become stragglers."""

from __future__ import annotations

import logging

from farandole.base.liveness import status_reporting
from farandole.base.wire.link_messages import StragglerSeen
from farandole.training.collectives import world
from farandole.training.state.step_state import StepState
from farandole.training.worker.worker_job import WorkerJob

logger = logging.getLogger("farandole")


def report_boundary(job: WorkerJob | None, state: StepState) -> None:
    """Report the position of this worker; as rank 0, also stragglers, and workers that are none any more."""
    here, loader = world.current(), state.loader
    balance = getattr(loader, "balance", None)
    for rank, percent, is_slow in balance.take_changes() if balance is not None else ():
        if here.placement.rank == 0 and job is not None:
            job.link.send(StragglerSeen(here.id.number, state.step, rank, percent, is_slow))
        elif here.placement.rank == 0:
            logger.warning("rank %d computes at %d %% of the others' speed", rank, percent)
    if loader is None:
        status_reporting.set_step(here.id.number, state.step)
        return
    trained, samples = loader.cursor, getattr(loader, "epoch_samples", 0)
    status_reporting.set_step(here.id.number, state.step, loader.epoch, min(trained, samples or trained), samples)
