"""Schedules of the ring: which part of a tensor moves in which step.

Order the sends and receives of each algorithm on the ring, as generators, which a ConnectionPair runs.

A schedule yields one buffer after the other, to be filled with the next bytes from the previous rank, and is resumed
when that buffer is full. It appends the data for the next rank to `outgoing`. A rank passes on the data that arrives,
so a schedule never waits to send, and no rank is idle while another one's block travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from farandole.errors import CollectiveMismatch
from farandole.training.collectives.chunks import blocks, chunk_bounds
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
        self.packed = header.pack()
        self._header, self._rank, self._ranks = header, rank, ranks

    def check(self, theirs: memoryview, back: int = 1) -> None:
        """Raise CollectiveMismatch unless the previous rank, or the one `back` ranks before, has the same header."""
        if theirs != self.packed:
            previous = self._ranks[self._rank - back]
            raise CollectiveMismatch(
                f"rank {self._ranks[self._rank]} is in {self._header.describe()}, but rank {previous} is in "
                f"{describe_packed(bytes(theirs))}; all ranks must make the same calls in the same order"
            )


def gather_around(outgoing: Outgoing, agreement: Agreement, rank: int, blobs: list[bytearray]) -> Schedule:
    """Send every rank's blob to every rank. `blobs[rank]` is full; the others have their length and are filled."""
    size = len(blobs)
    outgoing.append(memoryview(agreement.packed + blobs[rank]))
    first = memoryview(bytearray(HEADER_BYTES + len(blobs[rank - 1])))
    yield first
    agreement.check(first[:HEADER_BYTES])
    blobs[rank - 1][:] = first[HEADER_BYTES:]
    for step in range(1, size):
        if step > 1:
            yield memoryview(blobs[rank - step])
        if step < size - 1:
            outgoing.append(memoryview(blobs[rank - step]))


def reduce_around(
    outgoing: Outgoing,
    agreement: Agreement,
    rank: int,
    flat: torch.Tensor,
    trailers: list[bytearray],
    combine: Combine,
    last: Combine,
) -> Schedule:
    """Reduce `flat` over all ranks in place: reduce-scatter, then all-gather, each of size - 1 steps.

    In step s of the reduce-scatter a rank receives chunk and trailer of rank - s - 1, combines its own part with the
    chunk (by `last` in the last step), and passes both on. Then it owns the finished chunk of the next rank, and the
    finished chunks go around once more. Each chunk is reduced once, along one path, so that all ranks get the same
    bits.
    """
    size = len(trailers)
    data, item_bytes = byte_view(flat), flat.element_size()
    chunks = chunk_bounds(flat.numel(), size)
    arrived = torch.empty(min(BLOCK_BYTES // item_bytes, flat.numel()), dtype=flat.dtype)
    staging = byte_view(arrived)

    def runs(owner: int) -> Iterator[tuple[int, int]]:
        return blocks(*chunks[owner % size], BLOCK_BYTES // item_bytes)

    def part(start: int, stop: int) -> memoryview:
        return data[start * item_bytes : stop * item_bytes]

    outgoing.append(memoryview(agreement.packed + trailers[rank]))
    outgoing.append(part(*chunks[rank]))
    header = memoryview(bytearray(HEADER_BYTES))
    yield header
    agreement.check(header)
    for step in range(size - 1):
        owner = rank - step - 1
        function = last if step == size - 2 else combine
        trailer = memoryview(trailers[owner])
        yield trailer
        if step < size - 2:
            outgoing.append(trailer)
        for start, stop in runs(owner):
            yield staging[: (stop - start) * item_bytes]
            mine = flat[start:stop]
            function(mine, arrived[: stop - start], out=mine)
            outgoing.append(part(start, stop))
    for step in range(size - 1):
        for start, stop in runs(rank - step):
            yield part(start, stop)
            if step < size - 2:
                outgoing.append(part(start, stop))


def compare_around(outgoing: Outgoing, agreement: Agreement) -> Schedule:
    """Exchange only the header, where some ranks are known to be in another operation.

    A rank that learns of it from its neighbours raises, and the error goes around.
    """
    outgoing.append(memoryview(agreement.packed))
    header = memoryview(bytearray(HEADER_BYTES))
    yield header
    agreement.check(header)
    while True:
        yield header


def broadcast_around(
    outgoing: Outgoing, agreement: Agreement, rank: int, data: memoryview, source: int, size: int
) -> Schedule:
    """Copy `data` of rank `source` into `data` of every rank, in blocks, as a pipeline that ends before the source."""
    outgoing.append(memoryview(agreement.packed))
    if rank == source:
        outgoing.append(data)
    header = memoryview(bytearray(HEADER_BYTES))
    yield header
    agreement.check(header)
    if rank == source:
        return
    for start, stop in blocks(0, len(data), BLOCK_BYTES):
        yield data[start:stop]
        if (rank + 1) % size != source:
            outgoing.append(data[start:stop])
