"""A stream of a data set that can only be read from its beginning on, read by sample number for the stream reader."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from itertools import islice
from operator import itemgetter
from typing import Any, TypeAlias

from farandole.errors import DataError

Mark: TypeAlias = tuple[int, Any]
"""(number, result of state_dict() before the sample of this number is read)."""

_ENDED = object()


class Source:
    """A data set as streams that can be opened repeatedly.

    is_stateful  streams are opened by the results of their state_dict() (torchdata's protocol). Raises DataError when
                 it is known already that they have none
    """

    def __init__(self, dataset: Iterable[Any], streams: int, is_stateful: bool) -> None:
        self.dataset, self.streams, self.is_stateful = dataset, streams, is_stateful
        self._is_split = hasattr(dataset, "stream") or hasattr(dataset, "shard")
        self._beginning: Any = None
        if not is_stateful or self._is_split:
            return
        if streams > 1:
            raise DataError(
                f"stateful=True: {type(dataset).__name__} has neither stream(v, V) nor shard(num_shards, index), and "
                f"the state of the whole data set does not describe one of its {streams} streams; add one of these "
                f"methods, or use streams=1"
            )
        if has_state(dataset):  # it is opened itself each time: the next time from the same beginning
            self._beginning = copy.deepcopy(dataset.state_dict())  # type: ignore[attr-defined]

    def length(self, stream: int) -> int | None:
        """Return the number of samples of a stream, if the data set provides it."""
        dataset: Any = self.dataset
        return dataset.stream_length(stream, self.streams) if hasattr(dataset, "stream_length") else None

    def open(self, stream: int, epoch: int) -> Any:
        """Return a stream of an epoch from its beginning on, as an iterable."""
        dataset: Any = self.dataset
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        if hasattr(dataset, "stream"):
            return dataset.stream(stream, self.streams)
        if hasattr(dataset, "shard"):
            return dataset.shard(num_shards=self.streams, index=stream)
        if self.streams > 1:
            return islice(dataset, stream, None, self.streams)
        if self._beginning is not None:
            dataset.load_state_dict(copy.deepcopy(self._beginning))
        return dataset


class Stream:
    """A stream of a source, by its number, in one epoch.

    Read samples are kept until forget(), so that a batch which is handed out again is not read again. A request for an
    earlier sample opens the stream once more. `length`: the number of samples, if the data set provides it.
    """

    def __init__(self, source: Source, stream: int, epoch: int) -> None:
        self._source, self._stream, self._epoch = source, stream, epoch
        self.length = source.length(stream)
        self._floor = 0  # samples below this number are not kept
        self._stateful: Any = None  # the object whose state_dict() describes the iterator's position
        self._marks: dict[int, Any] = {}
        self._shut()

    def has(self, number: int) -> bool:
        """Return whether there is a sample of this number. Reads up to it, unless the data set provides the stream's
        length."""
        if self.length is not None:
            return number < self.length
        return self._read(number)

    def get(self, number: int) -> Any:
        """Return the sample of this number. Raises DataError when the stream has ended before it."""
        if not self._read(number):
            raise DataError(
                f"stream {self._stream} of {self._source.streams} has ended after {self._next} samples in epoch "
                f"{self._epoch}, but it had sample {number} before, or stream_length() returned {self.length}: "
                f"a stream that is opened again in one epoch must return the same samples"
            )
        return self._kept[number]

    def forget(self, below: int) -> None:
        """Drop the samples below this number, which are not expected to be requested again."""
        for number in range(self._floor, min(below, self._next)):
            self._kept.pop(number, None)
        self._floor = below
        nearest = max((number for number in self._marks if number <= below), default=below)
        self._marks = {number: state for number, state in self._marks.items() if number >= nearest}

    # Marks, at which the stream can be opened without reading the samples before -------------------------

    def learn(self, mark: Mark) -> None:
        """Add a mark that was made here or elsewhere."""
        self._marks.setdefault(*mark)

    def mark(self) -> None:
        """Remember how to open the stream at the sample that is read next. Not at its end, where many streams
        restart."""
        if self._stateful is not None and not self._is_ended and self._next not in self._marks:
            self._marks[self._next] = copy.deepcopy(self._stateful.state_dict())

    def nearest(self, number: int) -> Mark | None:
        """Return the last mark that is not behind this number."""
        return max(((at, state) for at, state in self._marks.items() if at <= number), key=itemgetter(0), default=None)

    # Reading ---------------------------------------------------------------------------------------------

    def _shut(self) -> None:
        self._iterator: Iterator[Any] | None = None
        self._stateful = None
        self._next, self._is_ended = 0, False  # number of the next sample of the iterator
        self._kept: dict[int, Any] = {}

    def _read(self, number: int) -> bool:
        if number < self._next:
            if number in self._kept:
                return True
            self._shut()  # the state went back
        try:
            if self._iterator is None:
                self._next = min(self._floor, number)
                self._iterator = self._open(self._next)
            while self._next <= number and not self._is_ended:
                sample = next(self._iterator, _ENDED)
                self._is_ended = sample is _ENDED
                if not self._is_ended:
                    self._kept[self._next] = sample
                    self._next += 1
        except BaseException:
            self._shut()  # an iterator that has raised would look ended
            raise
        return number in self._kept

    def _open(self, at: int) -> Iterator[Any]:
        """Open the stream from sample number `at` on: by a mark, else by skip() of the data set if it exists, else by
        reading."""
        samples = self._source.open(self._stream, self._epoch)
        if self._source.is_stateful:
            return self._open_by_mark(samples, at)
        if at and hasattr(samples, "skip"):
            return iter(samples.skip(at))
        return islice(samples, at, None)

    def _open_by_mark(self, samples: Any, at: int) -> Iterator[Any]:
        mark = self.nearest(at)
        is_loaded = mark is not None and has_state(samples)
        if mark is not None and is_loaded:
            samples.load_state_dict(copy.deepcopy(mark[1]))
        iterator: Iterator[Any] = iter(samples)
        self._stateful = samples if has_state(samples) else iterator
        if not has_state(self._stateful):
            raise DataError(
                f"stateful=True, but neither stream {self._stream} of {type(self._source.dataset).__name__} (a "
                f"{type(samples).__name__}) nor its iterator (a {type(iterator).__name__}) has state_dict() and "
                f"load_state_dict()"
            )
        if mark is not None and not is_loaded:
            self._stateful.load_state_dict(copy.deepcopy(mark[1]))
        for _ in range(at - (mark[0] if mark is not None else 0)):
            next(iterator, None)
        return iterator


def has_state(value: object) -> bool:
    """Return whether a value follows torchdata's protocol `Stateful`."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
