"""Reads the batches that are asked for, in the training process or in a loader worker. stream_loader.py makes one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as torch_worker

from farandole.data.augmentation import seed_item
from farandole.data.generators import generators_kept
from farandole.data.partition import batches, delivered, micro_batches, share
from farandole.data.stream_order import Place, walk
from farandole.data.stream_requests import Deal, Request
from farandole.data.streams import Mark, Source, Stream
from farandole.errors import DataError
from farandole.state.ticket import Batch, Ticket


@dataclass(frozen=True)
class Reply:
    """What has become of a request.

    batch   None where there is none: the epoch has ended, or the global batch has fewer micro-batches
    taken   its samples, as (stream, number)
    behind  where training is after the step of its global batch; None at the end of the epoch
    marks   of the streams that the global batch has samples of: how to open them behind it
    """

    batch: Batch | None
    behind: Place | None
    taken: list[tuple[int, int]] = field(default_factory=list)
    marks: Mapping[int, Mark] = field(default_factory=dict)


class StreamReader:
    """Answers requests: what torch's DataLoader takes for a data set.

    It walks through the streams from where it is to the global batch that is asked for. So each of several loader
    processes reads all streams, and `transform` and `collate` are divided among them.
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
        self._deal = -1
        self._walked = 0  # global batches of the deal
        self._taken: list[tuple[int, int]] = []  # the last of them
        self._place = self._behind = Place((0,) * source.streams)  # before and behind it

    def __getitem__(self, request: Request) -> tuple[Reply, Any]:
        """The reply and the batch, collated. Raises what the data set, transform and collate raise."""
        is_training_process = get_worker_info() is None
        with generators_kept() if is_training_process else contextlib.nullcontext():
            with _without_worker_info():
                self._go_to(request)
                if not self._taken:
                    return Reply(None, None), None
                batch = self._batch(request)
                if batch is None:
                    return Reply(None, self._behind), None
                low, high = delivered(batch, request.dealt.sizes.min_share)
                start = batch.ticket.start
                taken = self._taken[low - start : high - start]
                samples = [self._streams[stream].get(number) for stream, number in taken]
                marks = self._marks() if self._source.is_stateful else {}
            try:
                return Reply(batch, self._behind, taken, marks), self._collate(self._transformed(samples, batch, low))
            except StopIteration as error:  # would look like the end of the epoch
                raise DataError("transform or collate_fn raised StopIteration") from error

    def close(self) -> None:
        """Let go of the streams. The next request opens them again."""
        self._streams, self._epoch, self._deal = [], -1, -1

    def _go_to(self, request: Request) -> None:
        """Walk to the global batch that is asked for."""
        deal = request.dealt
        if deal.epoch != self._epoch:
            self._streams = [Stream(self._source, stream, deal.epoch) for stream in range(self._source.streams)]
            self._epoch = deal.epoch
        for number, mark in enumerate(request.marks or ()):
            if mark is not None:
                self._streams[number].learn(mark)
        for stream, offset in zip(self._streams, request.floor, strict=True):
            stream.forget(offset)
        if deal.number != self._deal or request.ticket < self._walked - 1:
            self._deal, self._walked, self._taken, self._behind = -1, 0, [], deal.place
        while self._walked <= request.ticket:
            self._walk(deal)
        self._deal = deal.number

    def _walk(self, deal: Deal) -> None:
        """Past the next global batch."""
        count, streams = deal.sizes.global_batch_size, self._streams
        run = -(-count // len(streams))
        taken, behind = walk(self._behind, count, run, lambda stream, number: streams[stream].has(number))
        self._taken, self._place, self._behind = taken, self._behind, behind
        self._walked += 1
        if self._source.is_stateful:
            for number in {stream for stream, _ in self._taken}:
                streams[number].mark()

    def _batch(self, request: Request) -> Batch | None:
        deal, sizes = request.dealt, request.dealt.sizes
        start, stop = self._place.cursor, self._behind.cursor
        low, high = share(start, stop, deal.rank, deal.world, sizes.min_share)
        parts = micro_batches(start, stop, deal.world, sizes.max_local_batch, sizes.min_share)
        if request.part >= parts:
            return None
        return batches(Ticket(deal.epoch, start, stop, low, high, parts), sizes.min_share)[request.part]

    def _transformed(self, samples: list[Any], batch: Batch, low: int) -> list[Any]:
        if self._transform is None:
            return samples
        done = []
        for position, sample in enumerate(samples, start=low):
            seed_item(self._seed, batch.ticket.epoch, position)
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
    """Data sets that divide themselves among torch's loader workers must not do so: every process reads all streams."""
    info = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info
