"""Schedules of the ring: which part of a tensor moves in which step.

Order the sends and receives of each algorithm on the ring, as generators, which a ConnectionPair runs.

A schedule yields one buffer after the other, to be filled with the next bytes from the previous rank, and is resumed
when that buffer is full. It appends the data for the next rank to `outgoing` of its turn. A rank passes on the data
that arrives, so a schedule never waits to send, and no rank is idle while another one's block travels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from farandole.errors import CollectiveMismatch
from farandole.training.collectives.connection_pair import Outgoing, Schedule, byte_view
from farandole.training.collectives.ring_header import HEADER_BYTES, Header, describe_packed

BLOCK_BYTES = 1 << 19
"""The unit of reduction and forwarding: not much more than the send buffer of a connection within the machine
(dialer.py), so that a block is added while it is in the cache. A multiple of every dtype's size."""

Combine = Callable[..., torch.Tensor]
"""combine(a, b, out=...): one of torch's elementwise functions, such as torch.add"""


class Agreement:
    """The header of one operation, which must be the previous rank's as well.

    `ranks` are the names of the ranks in error messages, in their order; `rank` is this one's place among them.
    """

    def __init__(self, header: Header, rank: int, ranks: Sequence[int]) -> None:
        self.header, self.packed = header, header.pack()
        self.rank, self._ranks = rank, ranks

    def check(self, theirs: memoryview, back: int = 1) -> None:
        """Raise CollectiveMismatch unless the previous rank, or the one `back` ranks before, has the same header."""
        if theirs != self.packed:
            previous = self._ranks[self.rank - back]
            raise CollectiveMismatch(
                f"rank {self._ranks[self.rank]} is in {self.header.describe()}, but rank {previous} is in "
                f"{describe_packed(bytes(theirs))}; all ranks must make the same calls in the same order"
            )


class Turn(Agreement):
    """One operation of the ring, and what this rank sends in it."""

    def __init__(self, header: Header, rank: int, ranks: Sequence[int]) -> None:
        super().__init__(header, rank, ranks)
        self.outgoing: Outgoing = deque()

    def agree(self) -> Schedule:
        """Receive the previous rank's header."""
        header = memoryview(bytearray(HEADER_BYTES))
        yield header
        self.check(header)


def gather_around(turn: Turn, blobs: list[bytearray]) -> Schedule:
    """Send every rank's blob to every rank. That of this rank is full; the others have their length and are filled."""
    size, rank = len(blobs), turn.rank
    turn.outgoing.append(memoryview(turn.packed + blobs[rank]))
    first = memoryview(bytearray(HEADER_BYTES + len(blobs[rank - 1])))
    yield first
    turn.check(first[:HEADER_BYTES])
    blobs[rank - 1][:] = first[HEADER_BYTES:]
    for step in range(1, size):
        if step > 1:
            yield memoryview(blobs[rank - step])
        if step < size - 1:
            turn.outgoing.append(memoryview(blobs[rank - step]))


def reduce_around(
    turn: Turn, flat: torch.Tensor, trailers: list[bytearray], combine: Combine, last: Combine
) -> Schedule:
    """Reduce `flat` over all ranks in place: reduce-scatter, then all-gather, each of size - 1 steps.

    In step s of the reduce-scatter a rank receives chunk and trailer of rank - s - 1, combines its own part with the
    chunk (by `last` in the last step), and passes both on. Then it owns the finished chunk of the next rank, and the
    finished chunks go around once more. Each chunk is reduced once, along one path, so that all ranks get the same
    bits.
    """
    chunks, outgoing = Chunks(flat, len(trailers)), turn.outgoing
    arrived = torch.empty(min(chunks.block, flat.numel()), dtype=flat.dtype, device="cpu")
    staging, item_bytes = byte_view(arrived), flat.element_size()
    outgoing.append(memoryview(turn.packed + trailers[turn.rank]))
    outgoing.append(chunks.part(*chunks.bounds[turn.rank]))
    yield from turn.agree()
    for step in range(chunks.size - 1):
        owner = turn.rank - step - 1
        function = last if step == chunks.size - 2 else combine
        trailer = memoryview(trailers[owner])
        yield trailer
        if step < chunks.size - 2:
            outgoing.append(trailer)
        for start, stop in chunks.runs(owner):
            yield staging[: (stop - start) * item_bytes]
            mine = flat[start:stop]
            function(mine, arrived[: stop - start], out=mine)
            outgoing.append(chunks.part(start, stop))
    yield from chunks.pass_on(turn)


def chunk_bounds(numel: int, ranks: int) -> list[tuple[int, int]]:
    """Return one chunk [start, stop) of elements for each rank, in order; together they cover all of `numel`.

    Sizes differ by at most one; with fewer elements than ranks some chunks are empty.
    """
    return [(numel * rank // ranks, numel * (rank + 1) // ranks) for rank in range(ranks)]


def blocks(start: int, stop: int, block: int) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) as consecutive runs of `block` elements; only the last may be shorter, none is empty."""
    for low in range(start, stop, block):
        yield low, min(low + block, stop)


class Chunks:
    """The chunks of a flat tensor, one for each of `size` ranks, which move in blocks of up to `block` elements."""

    def __init__(self, flat: torch.Tensor, size: int) -> None:
        self.size, self._item_bytes = size, flat.element_size()
        self.bounds, self.block = chunk_bounds(flat.numel(), size), BLOCK_BYTES // self._item_bytes
        self._data = byte_view(flat)

    def runs(self, owner: int) -> Iterator[tuple[int, int]]:
        """Yield the elements [start, stop) of each block in the chunk of rank `owner`, modulo the number of ranks."""
        return blocks(*self.bounds[owner % self.size], self.block)

    def part(self, start: int, stop: int) -> memoryview:
        """Return the bytes of the elements [start, stop)."""
        return self._data[start * self._item_bytes : stop * self._item_bytes]

    def pass_on(self, turn: Turn) -> Schedule:
        """Send the finished chunks around: this rank has that of the next rank, whose first block is on its way."""
        for step in range(self.size - 1):
            for start, stop in self.runs(turn.rank - step):
                yield self.part(start, stop)
                if step < self.size - 2:
                    turn.outgoing.append(self.part(start, stop))


def compare_around(turn: Turn) -> Schedule:
    """Exchange only the header, where some ranks are known to be in another operation.

    A rank that learns of it from its neighbours raises, and the error goes around.
    """
    turn.outgoing.append(memoryview(turn.packed))
    yield from turn.agree()
    more = memoryview(bytearray(HEADER_BYTES))
    while True:
        yield more


def broadcast_around(turn: Turn, data: memoryview, source: int, size: int) -> Schedule:
    """Copy `data` of rank `source` into `data` of every rank, in blocks, as a pipeline that ends before the source."""
    turn.outgoing.append(memoryview(turn.packed))
    if turn.rank == source:
        turn.outgoing.append(data)
    yield from turn.agree()
    if turn.rank == source:
        return
    for start, stop in blocks(0, len(data), BLOCK_BYTES):
        yield data[start:stop]
        if (turn.rank + 1) % size != source:
            turn.outgoing.append(data[start:stop])


def combine_in_order(
    flat: torch.Tensor, tensors: Iterable[torch.Tensor], combine: Combine, last: Combine | None = None
) -> None:
    """Reduce the tensors of all ranks into `flat`, in the order of the ranks, on whichever rank: the last one by
    `last`, if there is another function for it."""
    first, *others = tensors
    for number, other in enumerate(others, start=1):
        function = last if last is not None and number == len(others) else combine
        function(flat if number > 1 else first, other, out=flat)


# The choice of the schedule -------------------------------------------------------------------------------------------

# The cost of a hop beside its bytes, in bytes: about 50 us at about 2 GB/s. It is higher where ranks wait for a core:
# with both algorithms in turns on two busy cores, gathering won up to 192 KB among 2 and 4 ranks, and lost from 384 KB.
_HOP_BYTES = 100_000


def is_gathering_cheaper(nbytes: int, ranks: int) -> bool:
    """Return whether an all-reduce of `nbytes` among `ranks`, at least 2, is cheaper if every rank gets all tensors and
    reduces them itself, in half of the hops; the same on all of them.

    A gathering hop carries and reduces the whole tensor, so that all hops together cost (ranks - 1) * (hop + 2 *
    nbytes). The hops of the ring cost 2 * (ranks - 1) * (hop + 1.5 * nbytes / ranks), as half of them reduce.
    """
    return _HOP_BYTES + 2 * nbytes <= 2 * _HOP_BYTES + 3 * nbytes // ranks
