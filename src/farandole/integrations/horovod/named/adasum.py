"""Adasum: a sum that does not overshoot where ranks agree. The named engine reduces by it for op=Adasum.

Maleki et al., "Scaling Distributed Training with Adaptive Summation" (2020): the sum of two orthogonal gradients, the
average of two parallel ones, and values in between for others; more than two are combined in a binary tree.
"""

from __future__ import annotations

import torch

from farandole.training.collectives.connection_pair import byte_view, flat_view
from farandole.training.collectives.transport import Transport


def adasum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b, for two floating point tensors of one shape and dtype.
    Symmetric; a vector of zeros adds nothing. Products are summed in float64."""
    flat_a, flat_b = a.reshape(-1).double(), b.reshape(-1).double()
    dot = torch.dot(flat_a, flat_b)
    return _kept(dot, flat_a) * a + _kept(dot, flat_b) * b


def tree(parts: list[torch.Tensor]) -> torch.Tensor:
    """Combine all ranks' tensors, neighbours first: ((0, 1), (2, 3)), ((4, 5), (6, 7)), ... as in recursive halving.
    Raises NotImplementedError unless their number is a power of two."""
    require_power_of_two(len(parts))
    while len(parts) > 1:
        parts = [adasum(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def reduce(tensor: torch.Tensor, transport: Transport) -> None:
    """Replace a contiguous CPU tensor by the Adasum over all ranks, in place; the same bits on every rank.

    Each rank gathers all tensors and computes the whole tree, so it temporarily needs (number of ranks) x the tensor's
    memory. Half precision is combined in float32.

    Raises NotImplementedError unless the number of ranks is a power of two, ValueError for dtypes that are not floating
    point, and the errors of the transport; then the tensor is unchanged.
    """
    require_power_of_two(transport.size)
    if not tensor.is_floating_point():
        raise ValueError(f"Adasum takes floating point tensors, got {tensor.dtype}; use op=Sum or convert it")
    flat = flat_view(tensor)
    working = torch.promote_types(tensor.dtype, torch.float32)
    # torch views the bytes of a bytearray as a tensor without a warning; the payload itself is read-only.
    payloads = transport.all_gather(bytes(byte_view(flat)))
    if flat.numel():
        parts = [torch.frombuffer(bytearray(each), dtype=tensor.dtype).to(working) for each in payloads]
        flat.copy_(tree(parts))


def is_power_of_two(size: int) -> bool:
    return size > 0 and size & (size - 1) == 0


def require_power_of_two(size: int) -> None:
    """Raise NotImplementedError unless the number of ranks is a power of two."""
    if not is_power_of_two(size):
        raise NotImplementedError(
            f"Adasum combines ranks in pairs and needs 1, 2, 4, 8, ... of them, got {size}; start as many workers, "
            f"or use op=Average"
        )


def _kept(dot: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """Return the factor for `vector` so that the component that it shares with the other one counts half."""
    square = torch.dot(vector, vector)
    return 1.0 - torch.where(square > 0, dot / (2.0 * square), torch.zeros_like(dot))
