"""A stream of a data set that can only be read from its beginning on, as the stream loader reads it: by number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from farandole.errors import DataError

_ENDED = object()


class Stream:
    """Stream number `stream` of `streams`, in one epoch.

    Read samples are kept until forget(), so that a batch which is dealt anew is not read anew. What lies before them
    makes the stream be opened once more.
    """

    def __init__(self, dataset: Iterable[Any], stream: int, streams: int, epoch: int) -> None:
        self._dataset, self._stream, self._streams, self._epoch = dataset, stream, streams, epoch
        length = getattr(dataset, "stream_length", None)
        self._length: int | None = length(stream, streams) if length is not None else None
        self._iterator: Iterator[Any] | None = None
        self._start = self._next = 0  # numbers of the first kept sample, and of the next that the iterator gives
        self._kept: dict[int, Any] = {}

    def has(self, number: int) -> bool:
        """Whether there is a sample of this number. Reads up to it, unless the data set tells the stream's length."""
        if self._length is not None:
            return number < self._length
        return self._read(number)

    def get(self, number: int) -> Any:
        """The sample of this number. Raises DataError when the stream has ended before it."""
        if not self._read(number):
            raise DataError(
                f"stream {self._stream} of {self._streams} has ended after {self._next} samples in epoch "
                f"{self._epoch}, but sample {number} was there before, or stream_length() says {self._length}: "
                f"opened again in one epoch, a stream has to give the same samples"
            )
        return self._kept[number]

    def forget(self, below: int) -> None:
        """The samples below this number will not be asked for again, as far as anyone knows."""
        for number in range(self._start, min(below, self._next)):
            self._kept.pop(number, None)
        self._start = max(self._start, below)

    def close(self) -> None:
        """Reading again opens it again."""
        self._iterator, self._start, self._next, self._kept = None, 0, 0, {}

    def _read(self, number: int) -> bool:
        if number < self._start and number not in self._kept:
            self.close()  # the state went back
        if number < self._next:
            return number in self._kept
        if self._iterator is None:
            self._start = max(self._start, number)
            self._iterator = self._open(self._start)
            self._next = self._start
        while self._next <= number:
            sample = next(self._iterator, _ENDED)
            if sample is _ENDED:
                return False
            if self._next >= self._start:
                self._kept[self._next] = sample
            self._next += 1
        return True

    def _open(self, at: int) -> Iterator[Any]:
        """From sample number `at` on; skipped by the data set where it can, else by reading."""
        samples = self._samples()
        if at and hasattr(samples, "skip"):
            return iter(samples.skip(at))
        return islice(samples, at, None)

    def _samples(self) -> Any:
        dataset: Any = self._dataset
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(self._epoch)
        if hasattr(dataset, "stream"):
            return dataset.stream(self._stream, self._streams)
        if hasattr(dataset, "shard"):
            return dataset.shard(num_shards=self._streams, index=self._stream)
        return islice(dataset, self._stream, None, self._streams)
