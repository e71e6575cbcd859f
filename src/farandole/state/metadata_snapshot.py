"""A copy of the metadata, made at every boundary and read only when a step is repeated or on request.

Making the copy must be fast. Tensors are copied into existing memory. The rest usually consists of immutable values: it
is kept as it is then, and serialized when it is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from farandole.state.handlers import pack_metadata
from farandole.state.packing import Packed

_UNCHANGING = frozenset({int, float, bool, str, bytes, type(None)})


class MetadataSnapshot:
    """The argument of the last take(), as it was then."""

    def __init__(self) -> None:
        self._metadata: Mapping[str, Any] | None = None  # not packed yet
        self._packed = Packed(b"", [])
        self._sources: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []

    def take(self, metadata: Mapping[str, Any]) -> None:
        """Copy the metadata of a StepState. Its "stateful" and "values" may hold any type, the other parts only known
        types."""
        if _cannot_change(metadata):
            self._metadata, tensors = metadata, _buffers(metadata)
        else:
            packed = pack_metadata(metadata)
            self._metadata, tensors = None, packed.tensors
            self._packed = packed
        self._copy(tensors)

    def read(self) -> Packed:
        """Return the copy, which the caller must not change. An empty skeleton means that nothing was taken."""
        if self._metadata is not None:
            self._packed, self._metadata = pack_metadata(self._metadata), None
        return Packed(self._packed.skeleton, self._copies)

    def _copy(self, tensors: list[torch.Tensor]) -> None:
        if not _are_those(tensors, self._sources, self._copies):
            self._sources = tensors
            self._copies = [tensor.detach().clone() for tensor in tensors]
        elif tensors:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, tensors)  # private; see optim/loader_path.py


def _are_those(tensors: list[torch.Tensor], before: list[torch.Tensor], copies: list[torch.Tensor]) -> bool:
    """Return whether these are the tensors that the copies were made of, as is usual."""
    return len(tensors) == len(before) and all(
        tensor is each and tensor.numel() == copy.numel()
        for tensor, each, copy in zip(tensors, before, copies, strict=True)
    )


def _cannot_change(metadata: Mapping[str, Any]) -> bool:
    """Return whether all but the buffers is immutable. Every other part is a dictionary made for this call, of such
    values."""
    if metadata["stateful"]:
        return False
    options = [group for groups in metadata["groups"].values() for group in groups]
    return all(_are_unchanging(values.values()) for values in (metadata["loader"] or {}, metadata["values"], *options))


def _are_unchanging(values: Collection[object]) -> bool:
    others = set(map(type, values)) - _UNCHANGING
    if others != {tuple}:
        return not others
    return all(_UNCHANGING.issuperset(map(type, value)) for value in values if type(value) is tuple)


def _buffers(metadata: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the buffers in the order in which they are packed, each once."""
    all_of_them = [buffer for module in metadata["buffers"].values() for buffer in module.values()]
    return list({id(buffer): buffer for buffer in all_of_them}.values())
