"""An index stream whose batches are requested ahead, as loader processes do."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

from farandole.training.data.index_stream import IndexedBatch, IndexStream
from farandole.training.data.prefetch import Prefetch


class ReadAhead:
    """The loader of a Prefetch, without processes: `ahead` more batches are requested than are taken."""

    def __init__(self, stream: IndexStream, ahead: int) -> None:
        self._stream, self._ahead = stream, ahead

    def __iter__(self) -> Iterator[list[int]]:
        requests = iter(self._stream)
        on_way: deque[list[int]] = deque()
        while True:
            on_way.extend(islice(requests, self._ahead + 1 - len(on_way)))
            if not on_way:
                return
            yield on_way.popleft()


def read_ahead(stream: IndexStream, ahead: int) -> Prefetch[IndexedBatch]:
    """Return what takes the stream's batches, of which that many are requested ahead."""
    return Prefetch(ReadAhead(stream, ahead), stream, keeps_processes=True)
