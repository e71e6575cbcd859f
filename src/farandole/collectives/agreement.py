"""fd.mean and fd.any: small values that every worker must see alike.

In the loop body of an elastic function a call survives the loss of a worker: see worker/body_calls.py.
"""

from __future__ import annotations

import hashlib
from typing import Protocol, overload

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
    gradient. NaN when all weights are 0. When a worker is lost meanwhile, in the loop body of an elastic function, it
    is the mean over the workers that are left. Raises CollectiveMismatch when workers disagree on the shape.
    """
    if weight < 0:
        raise ValueError(f"mean: weight must not be negative, got {weight}")
    tensor = (
        value.detach().cpu() if isinstance(value, torch.Tensor) else torch.tensor(float(value), dtype=torch.float64)
    )
    sums = torch.empty(tensor.numel() + 1, dtype=torch.float64)
    # A worker with weight 0 has nothing to say, not even NaN.
    sums[:-1] = tensor.reshape(-1).double() * weight if weight else 0.0
    sums[-1] = weight
    sums = _sum(sums, f"mean of {tuple(tensor.shape)}")
    result = sums[:-1] / sums[-1]
    if not isinstance(value, torch.Tensor):
        return float(result.item())
    dtype = value.dtype if value.dtype.is_floating_point else torch.float64
    return result.to(dtype).reshape(value.shape).to(value.device)


def any(flag: bool) -> bool:
    """Whether the flag is true on at least one worker; every worker gets the same answer."""
    return bool(_sum(torch.tensor([1 if flag else 0], dtype=torch.int64), "any").item())


class CallHandler(Protocol):
    """Carries out the calls in the place of a plain reduction (worker/body_calls.py)."""

    def call(self, what: str, mine: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks. May raise RecoverableError."""
        ...


_handler: CallHandler | None = None


def install(handler: CallHandler | None) -> None:
    """Have `handler` carry out the calls from now on; None takes it away."""
    global _handler
    _handler = handler


def _sum(mine: torch.Tensor, what: str) -> torch.Tensor:
    return add_up(what, mine) if _handler is None else _handler.call(what, mine)


def add_up(what: str, mine: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks, a new tensor. Raises CollectiveMismatch unless `what` is the same everywhere."""
    world.raise_if_refused(what)
    total, here = mine.clone(), hashlib.blake2b(what.encode(), digest_size=16).digest()
    trailers = world.current().transport.all_reduce(total, here)
    others = [rank for rank, trailer in enumerate(trailers) if trailer != here]
    if others:
        raise CollectiveMismatch(
            f"ranks {others} called another collective, or with another shape, while rank "
            f"{world.current().placement.rank} called {what}; all workers must make the same calls"
        )
    return total
