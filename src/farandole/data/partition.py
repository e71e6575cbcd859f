"""Which positions of the global order a rank trains on. Pure; the dealer and the tests of the order use it.

Nothing here is stored: every division follows from the cursor and the world, so that a change of the world
re-divides what is left and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from farandole.errors import DataError
from farandole.state.ticket import Batch, Ticket


@dataclass(frozen=True)
class Layout:
    """How an epoch is cut into global batches, and these into loop bodies; the same on all ranks.

    size               samples of the data set
    global_batch_size  samples of one optimizer step, over all ranks; the last one of an epoch may be shorter
    max_local_batch    most samples of one loop body; larger shares are split into micro-batches; None: all
    min_share          fewest samples of one loop body, where there are so many (2 for BatchNorm)

    Raises DataError on values that cannot work.
    """

    size: int
    global_batch_size: int
    max_local_batch: int | None = None
    min_share: int = 1

    def __post_init__(self) -> None:
        if self.size < 1:
            raise DataError("the data set is empty: there is nothing to train on")
        if not 1 <= self.global_batch_size <= self.size:
            raise DataError(
                f"global_batch_size must be in 1..{self.size}, the size of the data set, got {self.global_batch_size}"
            )
        if not 1 <= self.min_share <= self.global_batch_size:
            raise DataError(
                f"min_share must be in 1..{self.global_batch_size}, the global batch size, got {self.min_share}"
            )
        # Smaller, some share n could not be split into parts between min_share and max_local_batch.
        if self.max_local_batch is not None and self.max_local_batch < 2 * self.min_share - 1:
            raise DataError(
                f"max_local_batch must be at least 2 * min_share - 1 = {2 * self.min_share - 1}, "
                f"got {self.max_local_batch}"
            )

    @property
    def global_batches(self) -> int:
        """Global batches, and so optimizer steps, of one epoch."""
        return -(-self.size // self.global_batch_size)


def make_ticket(layout: Layout, epoch: int, cursor: int, rank: int, world: int) -> Ticket:
    """The global batch at `cursor`, as rank `rank` of `world` gets it."""
    start, stop = global_batch(cursor, layout.size, layout.global_batch_size)
    low, high = share(start, stop, rank, world, layout.min_share)
    count = micro_batches(start, stop, world, layout.max_local_batch, layout.min_share)
    return Ticket(epoch, start, stop, low, high, count)


def batches(ticket: Ticket, min_share: int = 1) -> list[Batch]:
    """The micro-batches of a ticket, as many on every rank; one without a sample is a ghost."""
    count = ticket.micro_batches
    return [Batch(ticket, *share(ticket.low, ticket.high, index, count, min_share), index) for index in range(count)]


def global_batch(cursor: int, size: int, global_batch_size: int) -> tuple[int, int]:
    """Positions [start, stop) of the global batch at `cursor`; shorter at the end of the epoch."""
    return cursor, min(cursor + global_batch_size, size)


def share(start: int, stop: int, part: int, parts: int, min_share: int = 1) -> tuple[int, int]:
    """Positions [low, high) of one part of [start, stop), which is cut as evenly as can be. Divides a global
    batch among ranks, and a rank's share into micro-batches.

    With min_share > 1 only as many parts take samples as can have min_share of them, but always one.
    """
    samples = stop - start
    active = _active(samples, parts, min_share)
    low, high = min(part, active), min(part + 1, active)
    return start + low * samples // active, start + high * samples // active


def micro_batches(start: int, stop: int, world: int, max_local_batch: int | None, min_share: int = 1) -> int:
    """Micro-batches of the global batch [start, stop): from the largest share, so that all ranks agree."""
    if max_local_batch is None:
        return 1
    samples = stop - start
    largest = -(-samples // _active(samples, world, min_share))
    return -(-largest // max_local_batch)


def delivered(batch: Batch, min_share: int = 1) -> tuple[int, int]:
    """Positions of the samples that are in the tensors: the batch's own; for a ghost, min_share others of its
    global batch, which do not count."""
    if not batch.is_ghost:
        return batch.low, batch.high
    ticket = batch.ticket
    return max(ticket.start, ticket.stop - min_share), ticket.stop


def _active(samples: int, parts: int, min_share: int) -> int:
    return parts if min_share == 1 else max(1, min(parts, samples // min_share))
