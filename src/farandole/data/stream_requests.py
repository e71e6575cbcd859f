"""The requests for batches of streams: endless, and the loader may move them to another position at any time.

The contents of a global batch are known only after the streams have been read, so a request names it by its number,
counted from a position. As in index_stream.py, position and world are fixed between two restarts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from farandole.data.partition import micro_batches
from farandole.data.stream_order import Place
from farandole.data.streams import Mark
from farandole.errors import DataError


@dataclass(frozen=True)
class Sizes:
    """The sizes by which global batches are divided, as in DataLoader. Raises DataError on invalid values."""

    global_batch_size: int
    max_local_batch: int | None
    min_local_batch: int

    def __post_init__(self) -> None:
        count, most, least = self.global_batch_size, self.max_local_batch, self.min_local_batch
        if count < 1:
            raise DataError(f"global_batch_size must be 1 or more, got {count}")
        if not 1 <= least <= count:
            raise DataError(f"min_local_batch must be in 1..{count}, the global batch size, got {least}")
        # With a smaller limit, some local batch could not be split into parts between min_local_batch and
        # max_local_batch.
        if most is not None and most < 2 * least - 1:
            raise DataError(f"max_local_batch must be at least 2 * min_local_batch - 1 = {2 * least - 1}, got {most}")


@dataclass(frozen=True)
class FetchStart:
    """The position at which fetching starts, and the world that divides the global batches from there on."""

    restart_id: int
    epoch: int
    place: Place
    rank: int
    world: int
    sizes: Sizes

    @property
    def parts(self) -> int:
        """Number of micro-batches of a full global batch. Shorter ones have as many, or fewer: they are shared by fewer
        ranks only when each of these has less than 2 * min_local_batch samples, which max_local_batch allows."""
        sizes = self.sizes
        start, stop = 0, sizes.global_batch_size
        return micro_batches(start, stop, self.world, sizes.max_local_batch, sizes.min_local_batch)


@dataclass(frozen=True)
class Request:
    """A request for micro-batch number `part` of a global batch, counted by `global_batch_index` from the last restart.

    floor  offsets of the streams: samples below are trained for good
    marks  marks for opening streams, by stream; None when the reader has them already
    """

    fetch_start: FetchStart
    global_batch_index: int
    part: int
    floor: tuple[int, ...]
    marks: Sequence[Mark | None] | None

    @property
    def restart_id(self) -> int:
        """Number of the restart that the request belongs to."""
        return self.fetch_start.restart_id


class Requests:
    """Yields one request after the other, forever.

    on_way  requests that were yielded and not yet answered, in order
    floor   included in each request
    """

    def __init__(self, readers: int, fetch_start: FetchStart) -> None:
        self._readers = max(1, readers)
        self._fetch_start = fetch_start
        self._marks: Sequence[Mark | None] = ()
        self.on_way: deque[Request] = deque()
        self.floor = fetch_start.place.offsets

    @property
    def restart_id(self) -> int:
        """Number of the last restart."""
        return self._fetch_start.restart_id

    def restart(self, fetch_start: FetchStart, marks: Sequence[Mark | None]) -> None:
        """Fetch from there on. Requests under way belong to an earlier restart from now on."""
        self._fetch_start, self._marks, self.floor = fetch_start, marks, fetch_start.place.offsets

    def __iter__(self) -> Iterator[Request]:
        while True:
            fetch_start, asked = self._fetch_start, 0
            while fetch_start is self._fetch_start:
                # The readers take turns; marks may be large, and are sent once to each.
                marks = self._marks if asked < self._readers else None
                request = Request(fetch_start, *divmod(asked, fetch_start.parts), self.floor, marks)
                asked += 1
                self.on_way.append(request)
                yield request
