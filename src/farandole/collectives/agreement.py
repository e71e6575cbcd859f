"""fd.mean and fd.any: small values that every worker must see alike."""

from __future__ import annotations

import hashlib
from typing import overload

import torch

from farandole.collectives import world
from farandole.errors import CollectiveMismatch


@overload
def mean(value: float, weight: float = ...) -> float: ...
@overload
def mean(value: torch.Tensor, weight: float = ...) -> torch.Tensor: ...
def mean(value: float | torch.Tensor, weight: float = 1.0) -> float | torch.Tensor:
    """Weighted mean over all workers: sum(weight * value) / sum(weight), the same bits everywhere.

    value   a number, or a tensor of any shape (the same on all workers)
    weight  how much this worker's value counts, e.g. the number of samples behind it; not negative

    Summed in float64. A tensor comes back in its own shape and, if floating, dtype (else float64), without
    gradient. NaN when all weights are 0. Raises CollectiveMismatch when workers disagree on the shape.
    """
    if weight < 0:
        raise ValueError(f"mean: weight must not be negative, got {weight}")
    tensor = value.detach().cpu() if isinstance(value, torch.Tensor) else torch.tensor(float(value))
    sums = torch.empty(tensor.numel() + 1, dtype=torch.float64)
    # A worker with weight 0 has nothing to say, not even NaN.
    sums[:-1] = tensor.reshape(-1).double() * weight if weight else 0.0
    sums[-1] = weight
    _reduce(sums, f"mean of {tuple(tensor.shape)}")
    result = sums[:-1] / sums[-1]
    if not isinstance(value, torch.Tensor):
        return float(result.item())
    dtype = value.dtype if value.dtype.is_floating_point else torch.float64
    return result.to(dtype).reshape(value.shape).to(value.device)


def any(flag: bool) -> bool:
    """Whether the flag is true on at least one worker; every worker gets the same answer."""
    votes = torch.tensor([1 if flag else 0], dtype=torch.int64)
    _reduce(votes, "any")
    return bool(votes.item())


def _reduce(tensor: torch.Tensor, what: str) -> None:
    """Sum over all ranks; `what` must be the same everywhere, or nobody gets a result."""
    world.raise_if_refused(what)
    here = hashlib.blake2b(what.encode(), digest_size=16).digest()
    notes = world.current().transport.all_reduce(tensor, here)
    others = [rank for rank, note in enumerate(notes) if note != here]
    if others:
        raise CollectiveMismatch(
            f"ranks {others} called another collective, or with another shape, while rank "
            f"{world.current().placement.rank} called {what}; all workers must make the same calls"
        )
