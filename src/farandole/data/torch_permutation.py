"""The order of the samples for positions in a torch tensor, on any device: equal to Permutation's."""

from __future__ import annotations

import torch

from farandole.data.permutation import Permutation
from farandole.errors import DataError


def permute(order: Permutation, positions: torch.Tensor) -> torch.Tensor:
    """Return the sample at each position (int64, same shape and device). Raises DataError for a position outside [0,
    order.size)."""
    x = positions.to(torch.int64).flatten().clone()
    if x.numel() and not 0 <= int(x.min()) <= int(x.max()) < order.size:
        raise DataError(f"expected values in [0, {order.size}), got {int(x.min())}..{int(x.max())}")
    _mix(order, x)
    outside = torch.nonzero(x >= order.size).flatten()
    while outside.numel():
        again = x[outside]
        _mix(order, again)
        x[outside] = again
        outside = outside[again >= order.size]
    return x.reshape(positions.shape)


def _mix(order: Permutation, x: torch.Tensor) -> None:
    """Mix in place. Signed words wrap around like unsigned ones. Below the mask, of at most 62 bits, none is negative,
    so the arithmetic shift equals the logical one."""
    mask = (1 << order.bits) - 1
    for key in order.rounds:
        x.add_(_signed(key.add)).mul_(_signed(key.multiply)).bitwise_and_(mask)
        x.bitwise_xor_(x >> key.shift)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
