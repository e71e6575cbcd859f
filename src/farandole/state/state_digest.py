"""The digests of one rank's state, and their schedule: a block every few steps, a sample where time is short, or
everything.

sync.py compares these digests, and the step header carries them (optim/header.py). The state is hashed at boundaries
only, where the state of all ranks is that of the last decided step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch

from farandole.state.digest import LONG_BYTES, Piece, digest, digest_of
from farandole.state.digest_schedule import TURN, ByteRange, block_at, cut, is_due, sample_at
from farandole.state.named_tensors import NamedTensor
from farandole.state.packing import as_bytes, memory_at

STRIKES = 3


class StateDigest:
    """The digests of one state.

    tensors  returns all compared tensors, as they are now (named_tensors.py)

    is_suspicious  a step header has shown that ranks differ: everything is to be compared
    local          names of tensors that each rank computes from its own local batch: they are not compared. Never
                   tensors of parameters and optimizers
    suspects       tensors that differed and were made equal, with the number of times that they have differed again
                   after a single step. Tensors that do so STRIKES times in a row are local
    """

    def __init__(self, tensors: Callable[[], list[NamedTensor]]) -> None:
        self._tensors = tensors
        self._layout: _BlockLayout | None = None
        self._equal_at = 0  # the step at which the suspects were made equal
        self.is_suspicious = False
        self.local: frozenset[str] = frozenset()
        self.suspects: Mapping[str, int] = {}

    def of_due_block(self, step: int) -> int:
        """Return the digest for the header of this step: that of the block that is due; 0 when none is."""
        if self.suspects and step > self._equal_at:
            if step == self._equal_at + 1:
                return self._of_suspects(step)
            self.suspects = {}
        return self._of_block(step) if is_due(step) else 0

    def of_sample(self, step: int, trained_only: bool) -> int:
        """Return a digest of a sample that is read in a few milliseconds, of the tensors as they are now."""
        layout = self._begin_layout(step, (each for each in self._tensors() if each.is_trained or not trained_only))
        return digest(layout.pieces(sample_at(step, layout.sizes, layout.blocks)) or ())

    def by_name(self) -> dict[str, int]:
        """Return the digest of each tensor that no optimizer changes. sync.py reads the others itself."""
        found = ((each.name, each.find()) for each in self._compared() if not each.is_trained)
        return {name: digest_of([tensor]) for name, tensor in found if tensor is not None}

    def resolved(self, step: int, repaired: Mapping[str, int], local: Collection[str]) -> None:
        """Note that all ranks have the same state again.

        Args:
            step: Number of decided steps.
            repaired: Names of buffers and tracked tensors that differed, as `suspects`.
            local: Names of the tensors that no comparison includes from now on.
        """
        self.is_suspicious, self._layout = False, None
        self.local, self.suspects, self._equal_at = frozenset(local), repaired, step

    def _of_block(self, step: int) -> int:
        layout = self._layout
        if layout is None or layout.is_outdated(step):
            layout = self._begin_layout(step, self._compared())
            self._layout = layout
        pieces = layout.pieces(layout.blocks[block_at(step, len(layout.blocks))])
        if pieces is None:  # the tensors are not those of the layout
            self._layout = layout = self._begin_layout(step, self._compared())
            pieces = layout.pieces(layout.blocks[block_at(step, len(layout.blocks))]) or []
        return digest(pieces)

    def _of_suspects(self, step: int) -> int:
        found = (each.find() for each in self._compared() if each.name in self.suspects)
        pieces = [as_bytes(tensor) for tensor in found if tensor is not None]
        block = self._of_block(step) if is_due(step) else 0
        return (digest(pieces) ^ block) or 1

    def _compared(self) -> Iterator[NamedTensor]:
        return (each for each in self._tensors() if each.name not in self.local)

    def _begin_layout(self, step: int, tensors: Iterable[NamedTensor]) -> _BlockLayout:
        return _BlockLayout(step, list(tensors))


class _BlockLayout:
    """The tensors of a state, and the blocks into which they are cut.

    It is made anew in each turn, after a sync, and when a tensor was replaced, on all ranks at the same step. In the
    first steps it is made more often, since optimizers create their state in their first step.
    """

    def __init__(self, step: int, tensors: Sequence[NamedTensor]) -> None:
        self._step, self._tensors = step, tensors
        self._shapes = []
        self.sizes = []
        for each in tensors:
            tensor = each.find()
            assert tensor is not None, "the tensor was found before"
            self._shapes.append((tensor.shape, tensor.dtype))
            self.sizes.append(tensor.numel() * tensor.element_size())
        self.blocks = cut(self.sizes)

    def is_outdated(self, step: int) -> bool:
        return step // TURN != self._step // TURN or step <= 16

    def pieces(self, parts: Sequence[ByteRange]) -> list[Piece] | None:
        """Return the bytes of these parts; None when a tensor does not exist any more, or has another shape."""
        found: list[Piece] = []
        for place, start, stop in parts:
            tensor = self._tensors[place].find()
            if tensor is None or (tensor.shape, tensor.dtype) != self._shapes[place]:
                return None
            found.append(_bytes(tensor, start, stop))
        return found


def _bytes(tensor: torch.Tensor, start: int, stop: int) -> Piece:
    """Return bytes [start, stop) of a tensor in its logical order. Of a tensor that is not contiguous, only the needed
    rows are copied."""
    if tensor.is_contiguous() or tensor.dim() == 0:
        if tensor.is_cpu and stop - start < LONG_BYTES:
            return memory_at(tensor, start, stop)
        return as_bytes(tensor)[start:stop]
    row = tensor.numel() * tensor.element_size() // tensor.shape[0]
    first, last = start // row, -(-stop // row)
    return as_bytes(tensor[first:last])[start - first * row : stop - first * row]
