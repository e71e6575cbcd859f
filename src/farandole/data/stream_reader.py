"""The reader of requested batches, in the training process or in a loader worker. stream_loader.py creates it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as torch_worker

from farandole.data.augmentation import seed_item
from farandole.data.generators import generators_kept
from farandole.data.partition import batches, delivered, even_slice, micro_batches
from farandole.data.stream_order import Place, walk
from farandole.data.stream_requests import FetchStart, Request
from farandole.data.streams import Mark, Source, Stream
from farandole.errors import DataError
from farandole.state.global_batch import Batch, GlobalBatch


@dataclass(frozen=True)
class Reply:
    """The result of a request.

    batch   None where there is none: the epoch has ended, or the global batch has fewer micro-batches
    taken   its samples, as (stream, number)
    behind  position of the training after the step of its global batch; None at the end of the epoch
    marks   marks for opening the streams of the global batch's samples behind it
    """

    batch: Batch | None
    behind: Place | None
    taken: list[tuple[int, int]] = field(default_factory=list)
    marks: Mapping[int, Mark] = field(default_factory=dict)


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
    ) -> None:
        self._source, self._seed, self._transform, self._collate = source, seed, transform, collate
        self._streams: list[Stream] = []
        self._epoch = -1
        self._restart_id = -1
        self._walked = 0  # global batches since the last restart
        self._taken: list[tuple[int, int]] = []  # samples of the last of them
        self._place = self._behind = Place((0,) * source.streams)  # before and behind it

    def __getitem__(self, request: Request) -> tuple[Reply, Any]:
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

    def _go_to(self, request: Request) -> None:
        """Walk to the requested global batch."""
        fetch_start = request.fetch_start
        if fetch_start.epoch != self._epoch:
            self._streams = [Stream(self._source, stream, fetch_start.epoch) for stream in range(self._source.streams)]
            self._epoch = fetch_start.epoch
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

    def _batch(self, request: Request) -> Batch | None:
        fetch_start, sizes = request.fetch_start, request.fetch_start.sizes
        start, stop = self._place.cursor, self._behind.cursor
        low, high = even_slice(start, stop, fetch_start.rank, fetch_start.world, sizes.min_local_batch)
        parts = micro_batches(start, stop, fetch_start.world, sizes.max_local_batch, sizes.min_local_batch)
        if request.part >= parts:
            return None
        return batches(GlobalBatch(fetch_start.epoch, start, stop, low, high, parts), sizes.min_local_batch)[
            request.part
        ]

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
    every process reads all streams."""
    info = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info
