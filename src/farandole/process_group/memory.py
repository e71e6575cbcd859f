"""Convert tensors to contiguous memory, whatever the dtype, as transports need it. The collectives here use it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


@contextmanager
def in_place(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a contiguous tensor of the same values, outside autograd; data written into it is in `tensor` afterwards.

    Raises ValueError for a tensor that is not in the memory of the CPU.
    """
    require_cpu(tensor)
    detached = tensor.detach()
    if detached.is_contiguous() and not detached.is_conj() and not detached.is_neg():
        yield detached
        return
    copy = detached.clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
    yield copy
    detached.copy_(copy)


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy of it, outside autograd, for reading."""
    require_cpu(tensor)
    return tensor.detach().contiguous().resolve_conj().resolve_neg()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as flat uint8; writing into it writes into the tensor."""
    flat = tensor.detach().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return flat.view(torch.uint8)


def require_cpu(tensor: torch.Tensor) -> None:
    """Raise ValueError for a tensor without dense memory on the CPU."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise ValueError(
            f'the backend "farandole" moves dense CPU tensors, got one of layout {tensor.layout} on {tensor.device}; '
            f"use tensor.cpu(), or tensor.to_dense()"
        )


def require_same_size(op: str, tensors: Sequence[torch.Tensor], like: torch.Tensor) -> None:
    """Raise ValueError unless all have as many elements, of the same dtype."""
    for place, tensor in enumerate(tensors):
        if tensor.numel() != like.numel() or tensor.dtype != like.dtype:
            raise ValueError(
                f"{op}: tensor {place} of the list has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, expected "
                f"{tuple(like.shape)} and {like.dtype}"
            )
