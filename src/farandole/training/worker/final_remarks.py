"""What the last line of a job says of a training that is of no use, or has left samples out."""

from __future__ import annotations

import torch

from farandole.training.collectives import world
from farandole.training.state.step_state import StepState


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
        text = f"in {record.partial} of {steps} steps some samples had no backward pass"
        world.remark("partial steps", text)


@torch.no_grad()
def _is_finite(parameter: torch.nn.Parameter) -> bool:
    """Return whether all values of a parameter are finite; True for one whose values cannot be looked at."""
    is_usual = parameter.layout is torch.strided and parameter.device.type != "meta"
    return not is_usual or bool(torch.isfinite(parameter).all())
