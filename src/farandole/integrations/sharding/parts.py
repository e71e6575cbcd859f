"""The rows of divided parameters that a worker holds, with their optimizer state; and how they are sent."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from farandole.training.collectives.connection_pair import as_bytes
from farandole.training.state.tensor_digest import digest_of


class Part(NamedTuple):
    """A worker's part of one parameter: its own, or one that it mirrors.

    rows    by name, the rows of the parameter, "", and of the tensors of its optimizer state that are divided alike
    shared  by name, what else is in its optimizer state: equal on all workers
    """

    rows: dict[str, torch.Tensor]
    shared: dict[str, Any]

    def with_room(self, rows: int) -> Part:
        """Return such a part of so many rows, not filled."""
        room = {
            key: torch.empty((rows, *each.shape[1:]), dtype=each.dtype, device="cpu") for key, each in self.rows.items()
        }
        return Part(room, {key: copied(each) for key, each in self.shared.items()})


def copied(value: Any) -> Any:
    """Return a value of an optimizer's state, options or attributes that changes alone."""
    if isinstance(value, list | dict | set):
        return copy.copy(value)
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def digest(parts: Iterable[Part]) -> int:
    """Return a digest of the rows, equal for an owner and its mirror."""
    rows = [part.rows[key] for part in parts for key in sorted(part.rows)]
    return digest_of([each.contiguous() for each in rows if each.numel()])


def joined(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of these tensors, one after the other."""
    found = [as_bytes(each.contiguous()) for each in tensors if each.numel()]
    return torch.cat(found) if found else room_for(())


def room_for(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return room for the bytes of these tensors."""
    return torch.empty(sum(each.nbytes for each in tensors), dtype=torch.uint8, device="cpu")


def cut(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors like these, with these bytes."""
    # A copy of each: the bytes of a dtype have to be aligned.
    pieces = torch.split(flat, [each.nbytes for each in like]) if like else ()
    return [
        piece.clone().view(each.dtype).view(each.shape) if each.numel() else torch.empty_like(each)
        for piece, each in zip(pieces, like, strict=True)
    ]


def fill(tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Write these bytes into the tensors."""
    for target, each in zip(tensors, cut(flat, tensors), strict=True):
        target.copy_(each)
