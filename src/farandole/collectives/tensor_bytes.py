"""The bytes of a tensor, sent and received without a copy. All transports use it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from farandole.collectives.transport import Reduction

DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)
"""The dtypes that can be reduced and broadcast. A dtype's code on the wire is its place here, plus 1."""

_CODES = {dtype: code for code, dtype in enumerate(DTYPES, start=1)}


def dtype_code(dtype: torch.dtype) -> int:
    """Return the code of a dtype on the wire, from 1. Raises ValueError for a dtype that cannot be sent."""
    code = _CODES.get(dtype)
    if code is None:
        names = ", ".join(str(each).removeprefix("torch.") for each in DTYPES)
        raise ValueError(f"cannot reduce or broadcast {dtype}; convert it to one of {names}")
    return code


_COMBINERS: dict[Reduction, Callable[..., torch.Tensor]] = {
    Reduction.SUM: torch.add,
    Reduction.MIN: torch.minimum,
    Reduction.MAX: torch.maximum,
    Reduction.PRODUCT: torch.mul,
}


def combiner(op: Reduction) -> Callable[..., torch.Tensor]:
    """Return f(a, b, out=...) for a reduction that transports know. Raises ValueError for the others."""
    combine = _COMBINERS.get(op)
    if combine is None:
        names = ", ".join(each.name for each in _COMBINERS)
        raise ValueError(f"a transport reduces by {names}, got {op!r}")
    return combine


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's own memory as one dimension, outside autograd.

    Raises ValueError unless it is a contiguous CPU tensor of a dtype that can be sent.
    """
    if tensor.device.type != "cpu":
        raise ValueError(f"this transport takes CPU tensors, got shape {tuple(tensor.shape)} on {tensor.device}")
    return flat_on_its_device(tensor)


def flat_on_its_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same as flat_view() for a tensor on any device that has memory."""
    dtype_code(tensor.dtype)
    if tensor.device.type == "meta" or not tensor.is_contiguous():
        raise ValueError(
            f"a transport takes contiguous tensors, got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()} on {tensor.device}"
        )
    return tensor.detach().view(-1)


def byte_view(flat: torch.Tensor) -> memoryview:
    """Return the memory of a one-dimensional tensor as bytes; writing into it writes into the tensor."""
    return flat.view(torch.uint8).numpy().data
