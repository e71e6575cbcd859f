"""Compression of tensors for a reduction, and decompression of the result. Scripts subclass these classes."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import torch


class Compressor(Protocol):
    """A pair of functions that DistributedOptimizer and allreduce() apply around a reduction.

    Any class (or module) with these two functions will do; the names are Horovod's. The result of compress() must have
    the same shape on all ranks, and support addition.
    """

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send instead of `tensor`, and a context for decompress()."""
        ...

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return a reduced tensor in the format that compress() received."""
        ...


class NoneCompressor:
    """Sends tensors unchanged."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class FP16Compressor:
    """Sends floating point tensors as float16: half of float32's bytes, 65,504 at most."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return _cast(tensor, torch.float16)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class BF16Compressor:
    """Sends floating point tensors as bfloat16: float32's range with 8 bits of mantissa."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return _cast(tensor, torch.bfloat16)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class Compression:
    """The values of `compression=`: one of these, or a user's own class (see Compressor).

    Examples:
        >>> fd.allreduce(torch.ones(2), compression=fd.Compression.bf16)
        tensor([1., 1.])
    """

    # Declared as aliases, so that type checkers accept `class Mine(Compression.none)`.
    none: TypeAlias = NoneCompressor
    fp16: TypeAlias = FP16Compressor
    bf16: TypeAlias = BF16Compressor


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
    """Cast a floating point tensor; integers and bools pass unchanged."""
    return (tensor.to(dtype) if tensor.is_floating_point() else tensor), tensor.dtype
