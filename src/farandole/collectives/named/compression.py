"""Fewer bytes on the wire: what a tensor is turned into before it is reduced, and back. Scripts subclass these."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import torch


class Compressor(Protocol):
    """A pair of functions that DistributedOptimizer and allreduce() apply around a reduction.

    Any class (or module) with these two will do; Horovod's names. What compress() gives must have the same
    shape on all ranks, and be something that can be added up.
    """

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """What to send instead of `tensor`, and what decompress() needs to know."""
        ...

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """A reduced tensor, as compress() would have got it."""
        ...


class NoneCompressor:
    """Everything is sent as it is."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class FP16Compressor:
    """Floating point tensors are sent as float16: half of float32's bytes, 65,504 at most."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return _cast(tensor, torch.float16)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class BF16Compressor:
    """Floating point tensors are sent as bfloat16: float32's range with 8 bits of mantissa."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return _cast(tensor, torch.bfloat16)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class Compression:
    """What `compression=` takes: one of these, or a class of your own (see Compressor)."""

    # Said to be aliases, so that type checkers take `class Mine(Compression.none)`.
    none: TypeAlias = NoneCompressor
    fp16: TypeAlias = FP16Compressor
    bf16: TypeAlias = BF16Compressor


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
    """Integers and bools pass as they are."""
    return (tensor.to(dtype) if tensor.is_floating_point() else tensor), tensor.dtype
