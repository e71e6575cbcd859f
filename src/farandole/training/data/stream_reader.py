"""Batches of streams: their requests, and the reader that answers them, in the training process or a loader worker."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as torch_worker

from farandole.errors import DataError
from farandole.training.data.augmentation import generators_kept, seed_item
from farandole.training.data.partition import Sizes, batches, delivered, even_slice, micro_batches
from farandole.training.data.stream_order import StreamPosition, walk
from farandole.training.data.streams import Mark, Source, Stream
from farandole.training.state.batch import Batch, GlobalBatch
from farandole.training.state.content_hash import content_hash


@dataclass(frozen=True)
class Reply:
    """The result of a request.

    batch   None where there is none: the epoch has ended, or the global batch has fewer micro-batches
    taken   its samples, as (stream, number)
    behind  position of the training after the step of its global batch; None at the end of the epoch
    marks   marks for opening the streams of the global batch's samples behind it
    """

    batch: Batch | None
    behind: StreamPosition | None
    taken: list[tuple[int, int]] = field(default_factory=list)
    marks: Mapping[int, Mark] = field(default_factory=dict)


_MOST_CONTENTS = 10_000
_GAMMA = 0x9E3779B97F4A7C15  # of splitmix64: sequences of places without a pattern


class StreamReader:
    """Answers requests, as the data set of torch's DataLoader.

    It walks through the streams from its position to the requested global batch. So each of several loader processes
    reads all streams, and `transform` and `collate` are divided among them.
    """

    def __init__(
        self,
        source: Source,
        seed: int,
        transform: Callable[[Any], Any] | None,
        collate: Callable[[list[Any]], Any],
        sample_key: Callable[[Any], Any] | None = None,
    ) -> None:
        self._sample_key = sample_key
        # By the first sample and the one behind the last: `transform` may change samples, which may come again.
        self._contents: dict[tuple[int, int], int] = {}
        self._source, self._seed, self._transform, self._collate = source, seed, transform, collate
        self._streams: list[Stream] = []
        self._epoch = -1
        self._restart_id = -1
        self._walked = 0  # global batches since the last restart
        self._taken: list[tuple[int, int]] = []  # samples of the last of them
        self._place = self._behind = StreamPosition((0,) * source.streams)  # before and behind it

    def __getitem__(self, request: FetchRequest) -> tuple[Reply, Any]:
        """Return the reply and the batch, collated. Raises the errors of the data set, transform and collate."""
        is_training_process = get_worker_info() is None
        with generators_kept() if is_training_process else contextlib.nullcontext():
            with _without_worker_info():
                self._go_to(request)
                if not self._taken:
                    return Reply(None, None), None
                batch = self._batch(request)
                if batch is None:
                    return Reply(None, self._behind), None
                low, high = delivered(batch, request.fetch_start.sizes.min_local_batch)
                start = batch.global_batch.start
                taken = self._taken[low - start : high - start]
                samples = [self._streams[stream].get(number) for stream, number in taken]
                marks = self._marks() if self._source.is_stateful else {}
            try:
                return Reply(batch, self._behind, taken, marks), self._collate(self._transformed(samples, batch, low))
            except StopIteration as error:  # would look like the end of the epoch
                raise DataError("transform or collate_fn raised StopIteration") from error

    def close(self) -> None:
        """Release the streams. The next request opens them again."""
        self._streams, self._epoch, self._restart_id = [], -1, -1

    def _go_to(self, request: FetchRequest) -> None:
        """Walk to the requested global batch."""
        fetch_start = request.fetch_start
        if fetch_start.epoch != self._epoch:
            self._streams = [Stream(self._source, stream, fetch_start.epoch) for stream in range(self._source.streams)]
            self._epoch = fetch_start.epoch
            self._contents.clear()
        for number, mark in enumerate(request.marks or ()):
            if mark is not None:
                self._streams[number].learn(mark)
        for stream, offset in zip(self._streams, request.floor, strict=True):
            stream.forget(offset)
        if fetch_start.restart_id != self._restart_id or request.global_batch_index < self._walked - 1:
            self._restart_id, self._walked, self._taken, self._behind = -1, 0, [], fetch_start.place
        while self._walked <= request.global_batch_index:
            self._walk(fetch_start)
        self._restart_id = fetch_start.restart_id

    def _walk(self, fetch_start: FetchStart) -> None:
        """Walk past the next global batch."""
        count, streams = fetch_start.sizes.global_batch_size, self._streams
        run = -(-count // len(streams))
        taken, behind = walk(self._behind, count, run, lambda stream, number: streams[stream].has(number))
        self._taken, self._place, self._behind = taken, self._behind, behind
        self._walked += 1
        if self._source.is_stateful:
            for number in {stream for stream, _ in self._taken}:
                streams[number].mark()

    def _batch(self, request: FetchRequest) -> Batch | None:
        fetch_start, sizes = request.fetch_start, request.fetch_start.sizes
        start, stop = self._place.cursor, self._behind.cursor
        low, high = even_slice(start, stop, fetch_start.rank, fetch_start.world, sizes.min_local_batch)
        parts = micro_batches(start, stop, fetch_start.world, sizes.max_local_batch, sizes.min_local_batch)
        if request.part >= parts:
            return None
        content = 0 if request.part else self._content(start, stop)
        global_batch = GlobalBatch(fetch_start.epoch, start, stop, low, high, parts, content=content)
        return batches(global_batch, sizes.min_local_batch)[request.part]

    def _content(self, start: int, stop: int) -> int:
        """Return a hash by which workers compare the global batch: of all samples of the first one of an epoch, and of
        two of each other one. It depends on nothing but the streams."""
        if (start, stop) not in self._contents:  # a trial's batch begins at the same place
            if len(self._contents) > _MOST_CONTENTS:
                self._contents.clear()
            compared, lengths = self._taken, [each.length for each in self._streams]
            if None not in lengths:  # a stream is read by the workers that need it, and the lengths are compared
                compared = []
            elif start:
                compared = [self._taken[0], self._taken[start * _GAMMA % 2**64 % len(self._taken)]]
            samples = [self._streams[stream].get(number) for stream, number in compared]
            if self._sample_key is not None:
                samples = [self._sample_key(each) for each in samples]
            places = [number for place in self._taken for number in place]
            known = [-1 if each is None else each for each in lengths]
            self._contents[start, stop] = content_hash(samples, start, stop, *known, *places)
        return self._contents[start, stop]

    def _transformed(self, samples: list[Any], batch: Batch, low: int) -> list[Any]:
        if self._transform is None:
            return samples
        done = []
        for position, sample in enumerate(samples, start=low):
            seed_item(self._seed, batch.global_batch.epoch, position)
            done.append(self._transform(sample))
        return done

    def _marks(self) -> dict[int, Mark]:
        found = {}
        for stream in {stream for stream, _ in self._taken}:
            self._streams[stream].mark()  # with known lengths it was read only now
            found[stream] = self._streams[stream].nearest(self._behind.offsets[stream])
        return {stream: mark for stream, mark in found.items() if mark is not None}


@contextlib.contextmanager
def _without_worker_info() -> Iterator[None]:
    """Return a context without torch's worker info. Data sets must not divide themselves among torch's loader workers:
    every process reads all streams. get_worker_info() has no setter (torch 2.13, torch/utils/data/_utils/worker.py)."""
    info = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info


# The requests: endless, and the loader may move them to another position at any time ----------------------------------
#
# The contents of a global batch are known only after the streams have been read, so a request names it by its number,
# counted from a position.


@dataclass(frozen=True)
class FetchStart:
    """The position at which fetching starts, and the world that divides the global batches from there on."""

    restart_id: int
    epoch: int
    place: StreamPosition
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
class FetchRequest:
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


class FetchRequests:
    """Yields one request after the other, forever. An iteration begins with those on the way: the readers that have not
    answered them are lost.

    on_way  requests that were yielded and not yet answered, in order
    floor   included in each request
    marks   marks for opening the streams not behind the current position
    """

    is_through = False

    def __init__(self, readers: int, fetch_start: FetchStart) -> None:
        self._readers = max(1, readers)
        self._fetch_start = fetch_start
        self._place = fetch_start.place  # before the global batch of the first request on the way
        self.marks: Sequence[Mark | None] = ()
        self.on_way: deque[FetchRequest] = deque()
        self.floor = fetch_start.place.offsets

    @property
    def restart_id(self) -> int:
        """Number of the last restart."""
        return self._fetch_start.restart_id

    def restart(self, fetch_start: FetchStart, marks: Sequence[Mark | None]) -> None:
        """Fetch from there on. Requests under way belong to an earlier restart from now on."""
        self._fetch_start, self._place = fetch_start, fetch_start.place
        self.marks, self.floor = marks, fetch_start.place.offsets

    def answered(self, request: FetchRequest, behind: StreamPosition | None) -> None:
        """Note the answer to a request of the last restart. `behind`: the position behind its global batch."""
        if behind is not None and request.part + 1 == request.fetch_start.parts:
            self._place = behind

    def __iter__(self) -> Iterator[FetchRequest]:
        first = 0
        if self.on_way:
            first = self.on_way.popleft().part
            self._fetch_start = replace(self._fetch_start, restart_id=self.restart_id + 1, place=self._place)
            self.on_way.clear()
        while True:
            fetch_start, asked = self._fetch_start, first
            while fetch_start is self._fetch_start:
                # The readers take turns; marks may be large, and are sent once to each.
                marks = self.marks if asked < first + self._readers else None
                request = FetchRequest(fetch_start, *divmod(asked, fetch_start.parts), self.floor, marks)
                asked += 1
                self.on_way.append(request)
                yield request
            first = 0
