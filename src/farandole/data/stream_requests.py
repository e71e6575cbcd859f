"""Which batch of streams to read next: requests without end, which the loader may send elsewhere at any time.

What is in a global batch is known only to who has read the streams, so that a request names it by its number, counted
from a place. As in dealer.py, what is asked for between two restarts is a *deal*: one place, one world.
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
    """How global batches are cut, as in DataLoader. Raises DataError on values that cannot work."""

    global_batch_size: int
    max_local_batch: int | None
    min_share: int

    def __post_init__(self) -> None:
        count, most, least = self.global_batch_size, self.max_local_batch, self.min_share
        if count < 1:
            raise DataError(f"global_batch_size must be 1 or more, got {count}")
        if not 1 <= least <= count:
            raise DataError(f"min_share must be in 1..{count}, the global batch size, got {least}")
        # Smaller, some share could not be split into parts between min_share and max_local_batch.
        if most is not None and most < 2 * least - 1:
            raise DataError(f"max_local_batch must be at least 2 * min_share - 1 = {2 * least - 1}, got {most}")


@dataclass(frozen=True)
class Deal:
    """The place where a deal begins, and the world that global batches are divided in."""

    number: int
    epoch: int
    place: Place
    rank: int
    world: int
    sizes: Sizes

    @property
    def parts(self) -> int:
        """Micro-batches of a full global batch. Shorter ones have as many, or fewer: they are shared by fewer ranks
        only when each of these has less than 2 * min_share samples, which max_local_batch allows."""
        sizes = self.sizes
        start, stop = 0, sizes.global_batch_size
        return micro_batches(start, stop, self.world, sizes.max_local_batch, sizes.min_share)


@dataclass(frozen=True)
class Request:
    """Micro-batch `part` of the `ticket`-th global batch of a deal.

    floor  offsets of the streams: what lies below is trained for good
    marks  how streams can be opened, by stream; None where the reader has been told
    """

    dealt: Deal
    ticket: int
    part: int
    floor: tuple[int, ...]
    marks: Sequence[Mark | None] | None

    @property
    def deal(self) -> int:
        """The number of the deal."""
        return self.dealt.number


class Requests:
    """Yields one request after the other, for ever.

    on_way  what was yielded and not yet answered, in order
    floor   put into each request
    """

    def __init__(self, readers: int, deal: Deal) -> None:
        self._readers = max(1, readers)
        self._deal = deal
        self._marks: Sequence[Mark | None] = ()
        self.on_way: deque[Request] = deque()
        self.floor = deal.place.offsets

    @property
    def deal(self) -> int:
        """The number of the current deal."""
        return self._deal.number

    def restart(self, deal: Deal, marks: Sequence[Mark | None]) -> None:
        """Begin a new deal. What is on its way is of an old one then."""
        self._deal, self._marks, self.floor = deal, marks, deal.place.offsets

    def __iter__(self) -> Iterator[Request]:
        while True:
            deal, asked = self._deal, 0
            while deal is self._deal:
                # The readers take turns; marks may be large, and told once they are known.
                marks = self._marks if asked < self._readers else None
                request = Request(deal, *divmod(asked, deal.parts), self.floor, marks)
                asked += 1
                self.on_way.append(request)
                yield request
