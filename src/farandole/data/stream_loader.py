"""fd.elastic.StreamLoader: samples that come in streams, each exactly once per epoch, for any number of workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import default_collate

from farandole.data.boundary import Boundary, SoloBoundary
from farandole.data.epoch import Epoch
from farandole.data.partition import batches, delivered, micro_batches, share
from farandole.data.permutation import FORMAT_VERSION
from farandole.data.stream_order import Place, walk
from farandole.data.streams import Stream
from farandole.errors import DataError, StepError
from farandole.state import step
from farandole.state.ticket import Batch, Ticket


class StreamLoader:
    """Hands out the samples of an IterableDataset in global batches, divided among the workers there are.

        loader = StreamLoader(dataset, global_batch_size=256, streams=64, transform=decode)
        state = TorchState(model=model, optimizer=optimizer, loader=loader)
        for epoch in loader.epochs(10):
            for x, y in loader:
                ...                             # one optimizer step

    The data set is read as a fixed number of streams, which take turns; the k-th global batch has the same samples
    for every number of workers. Where training is are as many offsets. How stream v of V is opened:
        dataset.stream(v, V)                    an iterable, where the data set has this method
        dataset.shard(num_shards=V, index=v)    else, where it has that one, as Hugging Face's data sets do
        each V-th sample of the data set        else; the data set is read V times then, so that 1 stream is best
    Opened again in one epoch, a stream has to give the same samples. set_epoch(epoch) is called before, where the data
    set has it. A worker that joins opens them at their offsets: with skip(n) of the opened stream where it has that,
    else by reading what lies before. Workers that were there read on.

    Nobody knows where a stream ends before it is read, and all workers must know it. So every worker reads all
    streams, and only `transform` and `collate_fn` are divided, unless the data set has
        dataset.stream_length(v, V)             samples of a stream: a worker then reads only streams that it needs,
                                                the same ones each time when global_batch_size is a multiple of V

    global_batch_size  samples of one optimizer step, over all workers; the last one of an epoch may be shorter
    streams            V, fixed for the life of the saved state
    seed               of the steps' random numbers
    transform          one sample -> what is collated: the costly part, done only by the worker that trains it
    max_local_batch, min_share, and what a ghost is: as in DataLoader

    Samples are read in this process, when they are asked for: there are no loader workers, and nothing is prefetched.

    epoch, cursor  where training is; they move with decided steps only
    batch          the batch that is out; None before the first and after the last one
    indices        its samples, as v + V * (number in stream v); none for a ghost

    Raises DataError, with the values, for sizes that cannot work and for an iterator, which could be read only once.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        global_batch_size: int,
        *,
        streams: int = 1,
        seed: int = 0,
        transform: Callable[[Any], Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        max_local_batch: int | None = None,
        min_share: int = 1,
    ) -> None:
        _check(dataset, global_batch_size, streams, max_local_batch, min_share)
        self.dataset, self.seed = dataset, seed
        self.epoch = 0
        self.boundary: Boundary = SoloBoundary()
        self.batch: Batch | None = None
        self.indices: list[int] = []
        self._global_batch_size, self._max_local_batch, self._min_share = global_batch_size, max_local_batch, min_share
        self._transform, self._collate = transform, collate_fn or default_collate
        self._rank, self._world = 0, 1
        self._place = Place((0,) * streams)
        self._pending: Ticket | None = None  # its batch is out, or about to be, and its step not decided
        self._taken: list[tuple[int, int]] = []  # its samples
        self._behind = self._place  # where training is after its step
        self._queue: deque[Batch] = deque()  # its micro-batches that were not handed out
        self._open()
        self._deal()

    @property
    def cursor(self) -> int:
        """Samples of the epoch that were trained, by all workers together."""
        return self._place.cursor

    # Iterating -------------------------------------------------------------------------------------------

    def epochs(self, total: int) -> Iterator[Epoch]:
        """Numbers of the epochs from the current one to `total` - 1; as in DataLoader."""
        while self.epoch < total:
            yield Epoch.at(self.epoch, self.boundary)
            step.end_body()  # after `break`
            if self.boundary.reach_epoch_end():
                self.epoch, self._place = self.epoch + 1, Place((0,) * len(self._streams))
                self._open()
                self._deal()
                step.close()

    def __iter__(self) -> Iterator[Any]:
        """From the cursor to the end of the epoch. A batch that is out without a decided step comes again."""
        step.end_body()
        if self._pending is not None:
            self._deal()
            if step.state() != "aborted":  # the run loop has to see that
                step.close()
        return self

    def __next__(self) -> Any:
        """The next batch, collated. Raises StepError when the loop body made no step for the one before, and
        what the data set raised; epoch and cursor are as they were then."""
        step.end_body()
        self.boundary.reach()
        try:
            if not self._has_more_of_ticket() and not self._next_ticket():
                self._deal()
                step.close()
                raise StopIteration
            batch = self._queue.popleft()
            taken, data = self._fetch(batch)
        except (StepError, StopIteration):
            raise
        except BaseException:
            self.close()
            raise
        self.batch = batch
        self.indices = [] if batch.is_ghost else [stream + len(self._streams) * number for stream, number in taken]
        step.open(batch)
        return data

    def _has_more_of_ticket(self) -> bool:
        """Find out what became of the batch that is out. True: another micro-batch of its ticket follows."""
        if self.batch is None or self._pending is None:
            return False
        phase = step.state()
        if phase == "open" and not self.batch.is_last:
            return True
        if phase not in ("none", "aborted"):
            raise StepError(
                f"the next batch was asked for, but the step for samples [{self.batch.ticket.start}, "
                f"{self.batch.ticket.stop}) of epoch {self.epoch} is {phase!r}: every run of the loop body has to make "
                f"the step of a DistributedOptimizer, and the loader belongs into TorchState(loader=...)"
            )
        self._deal()
        return False

    def _next_ticket(self) -> bool:
        """Plan the global batch at the place where training is. False: the epoch has ended."""
        count, streams = self._global_batch_size, self._streams
        run = -(-count // len(streams))
        self._taken, self._behind = walk(self._place, count, run, lambda stream, number: streams[stream].has(number))
        if not self._taken:
            return False
        start, stop = self.cursor, self._behind.cursor
        low, high = share(start, stop, self._rank, self._world, self._min_share)
        parts = micro_batches(start, stop, self._world, self._max_local_batch, self._min_share)
        self._pending = Ticket(self.epoch, start, stop, low, high, parts)
        self._queue = deque(batches(self._pending, self._min_share))
        return True

    def _fetch(self, batch: Batch) -> tuple[list[tuple[int, int]], Any]:
        low, high = delivered(batch, self._min_share)
        start = batch.ticket.start
        taken = self._taken[low - start : high - start]
        try:
            samples = [self._streams[stream].get(number) for stream, number in taken]
            if self._transform is not None:
                samples = [self._transform(sample) for sample in samples]
            return taken, self._collate(samples)
        except StopIteration as error:  # would look like the end of the epoch
            raise DataError("transform or collate_fn raised StopIteration") from error

    # The batch that is out -------------------------------------------------------------------------------

    @property
    def ticket(self) -> Ticket | None:
        """The ticket of the batch that is out."""
        return self.batch.ticket if self.batch is not None else None

    def commit(self, ticket: Ticket) -> None:
        """The step of `ticket` is decided: the offsets move behind its samples. Raises DataError, with nothing
        changed, for any other than the ticket that is out: stale, or committed already."""
        out = self._pending
        if out is None or (ticket.epoch, ticket.start, ticket.stop) != (out.epoch, out.start, out.stop):
            raise DataError(
                f"cannot commit samples [{ticket.start}, {ticket.stop}) of epoch {ticket.epoch}: training is at sample "
                f"{self.cursor} of epoch {self.epoch}; commit each ticket once, while its batch is out"
            )
        self._place, self._pending = self._behind, None
        for stream, offset in zip(self._streams, self._place.offsets, strict=True):
            stream.forget(offset)

    # What survives ---------------------------------------------------------------------------------------

    def set_world(self, rank: int, size: int) -> None:
        """This worker is rank `rank` of `size` from the next batch on."""
        if not 0 <= rank < size:
            raise DataError(f"rank must be in 0..{size - 1}, got {rank}")
        self._rank, self._world = rank, size
        self._deal()

    def limit_local_batch(self, world: int) -> None:
        """As in DataLoader: without max_local_batch, the largest share in a world of this size."""
        if self._max_local_batch is None:
            self._max_local_batch = max(-(-self._global_batch_size // world), 2 * self._min_share - 1)
            self._deal()

    def state_dict(self) -> dict[str, Any]:
        """Where training is: one offset per stream and a few integers, the same on every worker."""
        place = {"epoch": self.epoch, "offsets": list(self._place.offsets), "turn": self._place.turn}
        return {**self._identity(), **place, "max_local_batch": self._max_local_batch or 0}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there. Raises DataError, with nothing changed, for the state of other streams."""
        for name, ours in self._identity().items():
            if state.get(name) != ours:
                raise DataError(
                    f"the saved loader has {name}={state.get(name)}, this one {ours}; go on with the values it was "
                    f"saved with, or without loading it"
                )
        epoch, offsets, turn = state["epoch"], tuple(state["offsets"]), state["turn"]
        streams = len(self._streams)
        if epoch < 0 or len(offsets) != streams or min(offsets) < 0 or not 0 <= turn < streams:
            raise DataError(f"no such place: epoch {epoch}, offsets {offsets}, turn {turn} of {streams} streams")
        is_other_epoch = epoch != self.epoch
        self.epoch, self._place = epoch, Place(offsets, turn)
        self._max_local_batch = state.get("max_local_batch") or self._max_local_batch
        if is_other_epoch:
            self._open()
        self._deal()

    def close(self) -> None:
        """Let go of the streams. Iterating again opens them again. Idempotent."""
        for stream in self._streams:
            stream.close()
        self._deal()

    def _identity(self) -> dict[str, int]:
        """What the offsets' meaning hangs on."""
        sizes = {"streams": len(self._streams), "global_batch_size": self._global_batch_size}
        return {"version": FORMAT_VERSION, "seed": self.seed, **sizes}

    def _open(self) -> None:
        streams = len(self._place.offsets)
        self._streams = [Stream(self.dataset, stream, streams, self.epoch) for stream in range(streams)]

    def _deal(self) -> None:
        """What is out will be handed out again, for the world as it is now."""
        self.batch, self.indices = None, []
        self._pending, self._taken, self._behind = None, [], self._place
        self._queue.clear()


def _check(dataset: object, global_batch_size: int, streams: int, max_local_batch: int | None, min_share: int) -> None:
    if isinstance(dataset, Iterator):
        raise DataError(
            f"{type(dataset).__name__} is an iterator, which can be read only once; give an object whose __iter__ "
            f"begins anew each time"
        )
    if not isinstance(dataset, Iterable) and not hasattr(dataset, "stream"):
        raise DataError(f"{type(dataset).__name__} needs __iter__ or stream(v, V) to be read in streams")
    if streams < 1 or global_batch_size < 1:
        raise DataError(f"streams and global_batch_size must be 1 or more, got {streams} and {global_batch_size}")
    if not 1 <= min_share <= global_batch_size:
        raise DataError(f"min_share must be in 1..{global_batch_size}, the global batch size, got {min_share}")
    if max_local_batch is not None and max_local_batch < 2 * min_share - 1:
        raise DataError(f"max_local_batch must be at least 2 * min_share - 1 = {2 * min_share - 1}")
