"""The digests of one rank's state, and their schedule: a block every few steps, a sample where time is short, or
everything.

sync.py compares these digests, and the step header carries them (optim/step_agreement.py). The state is hashed at
boundaries only, where the state of all ranks is that of the last decided step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from farandole.training.collectives.connection_pair import bytes_of, memory_at
from farandole.training.state.state_kinds import NamedTensor
from farandole.training.state.tensor_digest import LONG_BYTES, Piece, digest, digest_of

STRIKES = 3


class StateDigest:
    """The digests of one state.

    tensors  returns all compared tensors, as they are now

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
        layout = _BlockLayout(step, (each for each in self._tensors() if each.is_trained or not trained_only))
        return digest(layout.pieces(sample_at(step, layout.sizes, layout.blocks)) or ())

    def by_name(self) -> dict[str, int]:
        """Return the digest of each tensor that no optimizer changes. sync.py reads the others itself."""
        found = ((each.name, each.find()) for each in self._compared() if not each.is_trained)
        return {name: digest_of([tensor]) for name, tensor in found if tensor is not None}

    def resolved(self, step: int, repaired: Mapping[str, int], local: Collection[str]) -> None:
        """Note that all ranks have the same state again after this step. From now on `repaired` are the suspects, and
        no comparison includes `local`."""
        self.is_suspicious, self._layout = False, None
        self.local, self.suspects, self._equal_at = frozenset(local), repaired, step

    def _of_block(self, step: int) -> int:
        layout = self._layout
        pieces = None if layout is None or layout.is_outdated(step) else layout.block(step)
        if pieces is None:  # it is outdated, or the tensors are other ones
            self._layout = layout = _BlockLayout(step, self._compared())
            pieces = layout.block(step)
        return digest(pieces or ())

    def _of_suspects(self, step: int) -> int:
        found = (each.find() for each in self._compared() if each.name in self.suspects)
        pieces = [bytes_of(tensor) for tensor in found if tensor is not None]
        block = self._of_block(step) if is_due(step) else 0
        return (digest(pieces) ^ block) or 1

    def _compared(self) -> Iterator[NamedTensor]:
        return (each for each in self._tensors() if each.name not in self.local)


class _BlockLayout:
    """The tensors of a state, and the blocks into which they are cut.

    It is made anew in each turn, after a sync, and when a tensor was replaced, on all ranks at the same step. In the
    first steps it is made more often, since optimizers create their state in their first step.
    """

    def __init__(self, step: int, tensors: Iterable[NamedTensor]) -> None:
        self._step, self._tensors = step, list(tensors)
        self._shapes = []
        self.sizes = []
        for each in self._tensors:
            tensor = each.find()
            assert tensor is not None, "the tensor was found before"
            self._shapes.append((tensor.shape, tensor.dtype))
            self.sizes.append(tensor.numel() * tensor.element_size())
        self.blocks = cut(self.sizes)

    def is_outdated(self, step: int) -> bool:
        return step // TURN != self._step // TURN or step <= 16

    def block(self, step: int) -> list[Piece] | None:
        """Return the bytes of the block that is due at this step, or was due last; None as pieces() does."""
        return self.pieces(self.blocks[block_at(step, len(self.blocks))])

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
        return bytes_of(tensor)[start:stop]
    row = tensor.numel() * tensor.element_size() // tensor.shape[0]
    first, last = start // row, -(-stop // row)
    return bytes_of(tensor[first:last])[start - first * row : stop - first * row]


# The schedule by which parts of the state are hashed ------------------------------------------------------------------
#
# It depends only on the sizes of the tensors and the step, so that all ranks hash the same part.

EVERY = 8
"""Steps from one hashed block to the next one."""

BLOCKS = 32
"""Maximum number of blocks of a state."""

TURN = EVERY * BLOCKS
"""Steps in which every block is hashed once."""

HEAD_BYTES = 4096  # of each tensor of a sample
_WHOLE_BYTES = 6 << 20  # a state of at most this size is its own sample: some 2 ms
_MORE_BYTES = 1 << 20  # of the block in turn, in a sample
_HEADS = 400  # tensors in a sample: some 3 ms

_TENSOR_BYTES = 16 << 10  # bytes that are hashed in the time that one more tensor costs
_BLOCK_BYTES = 2 * _TENSOR_BYTES  # smallest block, where that saves steps


class ByteRange(NamedTuple):
    """Bytes [start, stop) of the tensor at `place` of the list."""

    place: int
    start: int
    stop: int


def is_due(step: int) -> bool:
    """Return whether a block is hashed at the boundary before this step."""
    return step % EVERY == 0


def cut(sizes: Sequence[int]) -> list[list[ByteRange]]:
    """Cut tensors of these sizes in bytes into at most BLOCKS blocks that take about the same time; at least one."""
    total = sum(sizes) + _TENSOR_BYTES * len(sizes)
    blocks = max(1, min(BLOCKS, total // _BLOCK_BYTES))
    length = -(-total // blocks)
    cuts: list[list[ByteRange]] = [[] for _ in range(blocks)]
    position = 0
    for place, size in enumerate(sizes):
        position += _TENSOR_BYTES
        start = 0
        while start < size:
            block = min((position + start) // length, blocks - 1)
            end = size if block == blocks - 1 else (block + 1) * length - position
            stop = min(size, -(-end // 64) * 64)
            cuts[block].append(ByteRange(place, start, stop))
            start = stop
        position += size
    return cuts


def block_at(step: int, blocks: int) -> int:
    """Return the number of the block that is due at this step, or was due last."""
    return step // EVERY % blocks


def sample_at(step: int, sizes: Sequence[int], blocks: Sequence[Sequence[ByteRange]]) -> list[ByteRange]:
    """Return the parts that are compared where time is short. A state of a few MiB is compared whole. Of a larger one,
    the parts are the beginning of each tensor (with very many tensors, of some of them in turn) and the beginning of
    one block in turn."""
    if sum(sizes) <= _WHOLE_BYTES and len(sizes) <= _HEADS:
        return [ByteRange(place, 0, size) for place, size in enumerate(sizes)]
    stride = -(-len(sizes) // _HEADS)
    heads = [
        ByteRange(place, 0, min(size, HEAD_BYTES)) for place, size in enumerate(sizes) if (place + step) % stride == 0
    ]
    return [*heads, *_beginning(blocks[block_at(step, len(blocks))])]


def _beginning(block: Sequence[ByteRange]) -> Iterator[ByteRange]:
    left = _MORE_BYTES
    for place, start, stop in block:
        if left > 0:
            yield ByteRange(place, start, min(stop, start + left))
        left -= stop - start
