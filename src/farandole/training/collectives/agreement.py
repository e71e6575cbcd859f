"""fd.mean and fd.any: small values that must be equal on all workers.

In the loop body of an elastic function a call survives the loss of a worker: see worker/worker_recovery.py.
"""

from __future__ import annotations

import hashlib
from typing import Protocol, overload

import torch

from farandole.errors import CollectiveMismatch
from farandole.training.collectives import world

# What errors advise where some workers have left a loop that the others are still in.
DECIDE_TOGETHER = "Decide it by a value that is the same on all of them, such as fd.any(condition) or fd.mean(loss)"
LEAVE_TOGETHER = f"all workers have to leave it at the same point of the loop. {DECIDE_TOGETHER}"


@overload
def mean(value: float, weight: float = ...) -> float: ...
@overload
def mean(value: torch.Tensor, weight: float = ...) -> torch.Tensor: ...
def mean(value: float | torch.Tensor, weight: float = 1.0) -> float | torch.Tensor:
    """Return the weighted mean over all workers, sum(weight * value) / sum(weight), with the same bits on all of them.

    The sums are computed in float64. When a worker is lost during the call, in the loop body of an elastic function,
    the result is the mean over the remaining workers.

    Args:
        value: A number, or a tensor of any shape (the same on all workers).
        weight: The weight of this worker's value, e.g. the number of samples behind it; not negative.

    Returns:
        A number for a number. A tensor keeps its shape and, if floating, its dtype (else float64), without gradient.
        NaN when all weights are 0.

    Raises:
        CollectiveMismatch: The workers disagree on the shape.
        ValueError: The weight is negative.
        RecoverableError: A worker was lost, and this is no loop body.
        NotInitialized: `init()` was not called.

    Examples:
        >>> fd.mean(2.5, weight=10)  # on one worker
        2.5
    """
    if weight < 0:
        raise ValueError(f"mean: weight must not be negative, got {weight}")
    tensor = (
        value.detach().cpu()
        if isinstance(value, torch.Tensor)
        else torch.tensor(float(value), dtype=torch.float64, device="cpu")
    )
    sums = torch.empty(tensor.numel() + 1, dtype=torch.float64, device="cpu")
    # A worker with weight 0 contributes nothing, not even NaN.
    sums[:-1] = tensor.reshape(-1).double() * weight if weight else 0.0
    sums[-1] = weight
    sums = _sum(sums, f"mean of {tuple(tensor.shape)}")
    result = sums[:-1] / sums[-1]
    if not isinstance(value, torch.Tensor):
        return float(result.item())
    dtype = value.dtype if value.dtype.is_floating_point else torch.float64
    return result.to(dtype).reshape(value.shape).to(value.device)


def any(flag: bool) -> bool:
    """Return True if the flag is true on at least one worker; all workers get the same answer.

    When a worker is lost during the call, in the loop body of an elastic function, the answer is that of the
    remaining workers.

    Args:
        flag: The flag of this worker.

    Raises:
        HorovodInternalError: The operation failed: PeerLost or GenerationEnded when a worker was lost;
            CollectiveMismatch, on all ranks, when they disagree about it.
        NotInitialized: `init()` was not called.

    Examples:
        >>> fd.any(False)
        False
    """
    return bool(_sum(torch.tensor([1 if flag else 0], dtype=torch.int64, device="cpu"), "any").item())


class CallHandler(Protocol):
    """Carries out the calls instead of a plain reduction (worker/worker_recovery.py)."""

    def call(self, what: str, mine: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks. May raise RecoverableError."""
        ...


def install(handler: CallHandler | None) -> None:
    """Have `handler` carry out the calls from now on; None removes the handler."""
    world.view.call_handler = handler


def _sum(mine: torch.Tensor, what: str) -> torch.Tensor:
    handler = world.view.call_handler
    return add_up(what, mine) if handler is None else handler.call(what, mine)


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
