"""What a worker reports of its training: at each boundary where it is, and which workers have become stragglers; for
the last line of the job, that the training is of no use, or has left samples out.
"""

from __future__ import annotations

import logging

import torch

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


def remark_training(state: StepState, is_over: bool) -> None:
    """Say what was not trained, and that a model is of no use. `is_over`: the script does not train further, as a
    static job."""
    named = (each for module in state.modules() for each in module.named_parameters())
    if bad := next((name for name, each in named if not _is_finite(each)), ""):
        world.remark("finite parameters", f"the parameter {bad} is not finite (NaN or infinite)")
    record, steps = getattr(state.loader, "record", None), state.step
    if record is None:
        return
    if record.skipped == steps and (is_over or steps):
        world.remark("skipped steps", "nothing was trained")
    elif record.skipped:
        world.remark("skipped steps", f"{record.skipped} of {steps} steps trained nothing, and were skipped")
    if record.partial:
        world.remark("partial steps", f"in {record.partial} of {steps} steps some samples had no backward pass")


@torch.no_grad()
def _is_finite(parameter: torch.nn.Parameter) -> bool:
    """Return whether all values of a parameter are finite; True for one whose values cannot be looked at."""
    is_usual = parameter.layout is torch.strided and parameter.device.type != "meta"
    return not is_usual or bool(torch.isfinite(parameter).all())
