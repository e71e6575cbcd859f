"""The schedule by which parts of the state are hashed. It depends only on the sizes of the tensors and the step, so
that all ranks hash the same part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

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
