"""horovod.data: loaders that read ahead in a thread give what they would give without it."""

from __future__ import annotations

import importlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest

DEADLINE_S = 20.0


def loader(size: int, batches: int, fails_at: int | None = None) -> Any:
    """A loader of `batches` numbers that counts on from pass to pass, reads `size` ahead, and doubles in the loop."""
    data = importlib.import_module("horovod.data")

    class Numbers(data.BaseDataLoader):  # type: ignore[misc, name-defined]
        def __init__(self, count: int) -> None:
            self.count, self.passes, self.read = count, itertools.count(), 0

        def __len__(self) -> int:
            return self.count

        def _iterate(self) -> Iterator[int]:
            number = next(self.passes)
            for index in range(self.count):
                if index == fails_at and number == 0:
                    raise OSError("the disk is gone")
                self.read += 1
                yield number * self.count + index

        def _process_batch(self, batch: int) -> int:
            return 2 * batch

    class Ahead(data.AsyncDataLoaderMixin, Numbers):  # type: ignore[misc, name-defined]
        pass

    return Ahead(size, False, batches)


@pytest.mark.parametrize("size", [0, 1, 64])
def test_passes_follow_each_other_whatever_is_read_ahead(size: int) -> None:
    numbers = loader(size, 3)
    assert len(numbers) == 3
    assert [list(numbers) for _ in range(3)] == [[0, 2, 4], [6, 8, 10], [12, 14, 16]]
    numbers.close_async_loader()


def test_what_reading_raises_the_loop_gets_and_the_next_pass_begins_anew() -> None:
    numbers = loader(4, 2, fails_at=1)
    first = iter(numbers)
    assert next(first) == 0
    with pytest.raises(OSError, match="the disk is gone"):
        next(first)
    assert list(numbers) == [4, 6]
    numbers.close_async_loader()


def test_a_closed_loader_reads_no_more_and_says_so() -> None:
    numbers = loader(1, 1000)
    assert next(iter(numbers)) == 0
    numbers.close_async_loader()
    numbers.close_async_loader()
    assert "horovod-data" not in {thread.name for thread in threading.enumerate()}
    assert numbers.read < 1000
    with pytest.raises(RuntimeError, match="was closed"):
        next(iter(numbers))
