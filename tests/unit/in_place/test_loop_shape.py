"""Loops that count their batches are told from loops that end with them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from farandole.integrations.torchrun.in_place.loop_shape import line_that_collects, line_that_counts, loop_variables


def batches(count: int = 3) -> Iterator[str]:
    """Yield the lines that count, as seen when each batch is asked for."""
    for _ in range(count):
        yield line_that_counts()


def by_for() -> list[str]:
    found = []
    for line in batches():
        found.append(line)
    return found


def by_comprehension() -> list[str]:
    return [line for _, line in enumerate(batches())]


def by_list() -> list[str]:
    return list(batches())


def by_star() -> list[str]:
    return [*batches()]


def by_generators() -> list[str]:
    def moved(lines: Iterable[str]) -> Iterator[str]:
        for line in lines:
            yield str(line)

    def delegated(lines: Iterable[str]) -> Iterator[str]:
        yield from lines

    return [str(line) for line in moved(delegated(moved(batches())))]


def by_next_until_the_end() -> list[str]:
    found, lines = [], batches()
    while True:
        try:
            found.append(next(lines))
        except StopIteration:
            return found


def by_next_in_a_counting_loop_that_the_end_leaves() -> list[str]:
    found, lines = [], batches()
    for _ in range(10):
        try:
            found.append(next(lines))
        except StopIteration:
            break
    return found


def by_next_that_begins_anew_until_enough() -> list[str]:
    found, lines = [], batches()
    while len(found) < 5:
        try:
            found.append(next(lines))
        except StopIteration:
            lines = batches()
    return found


def by_next_in_a_function_whose_caller_handles_the_end() -> list[str]:
    found, lines = [], batches()

    def take() -> None:
        found.append(next(lines))

    with suppress(StopIteration):
        while True:
            take()
    return found


def by_next_with_a_default() -> list[str]:
    found, lines = [], batches()
    while (line := next(lines, None)) is not None:
        found.append(line)
    return found


class Moved:
    """A class around an iterator, as for a device."""

    def __init__(self) -> None:
        self._lines = batches()

    def __iter__(self) -> Moved:
        return self

    def __next__(self) -> str:
        return next(self._lines)


def by_class() -> list[str]:
    return [str(line) for line in Moved()]


def by_generator_that_handles_the_end() -> list[str]:
    def ahead(lines: Iterator[str]) -> Iterator[str]:
        line = next(lines)
        while True:
            try:
                following = next(lines)
            except StopIteration:
                yield line
                return
            yield line
            line = following

    return [*ahead(batches())][1:]  # its first next() has no handler: it looks at the first batch only


@pytest.mark.parametrize(
    "loop",
    [
        by_for,
        by_comprehension,
        by_list,
        by_star,
        by_generators,
        by_next_until_the_end,
        by_next_in_a_counting_loop_that_the_end_leaves,
        by_next_that_begins_anew_until_enough,
        by_next_in_a_function_whose_caller_handles_the_end,
        by_next_with_a_default,
        by_class,
        by_generator_that_handles_the_end,
    ],
)
def test_a_loop_that_ends_with_its_batches_does_not_count_them(loop: Callable[[], list[str]]) -> None:
    found = loop()
    assert len(found) >= 2
    assert set(found) == {""}


def counted_in_the_loop() -> list[str]:
    lines = batches()
    return [next(lines) for _ in range(3)]


def counted_by_a_method() -> list[str]:
    found, lines = [], batches()
    for _ in range(3):
        found.append(lines.__next__())
    return found


def counted_in_a_function() -> list[str]:
    lines = batches()

    def take() -> str:
        return next(lines)

    return [take() for _ in range(3)]


def counted_around_a_generator() -> list[str]:
    found, lines = [], (str(line) for line in batches())
    for _ in range(3):
        found.append(next(lines))
    return found


def counted_in_a_generator() -> list[str]:
    def endless() -> Iterator[str]:
        lines = batches()
        for _ in range(3):
            yield next(lines)

    return [*endless()]


def counted_around_a_class() -> list[str]:
    found, lines = [], Moved()
    for _ in range(3):
        found.append(next(lines))
    return found


def counted_in_a_program_that_handles_every_error() -> list[str]:
    try:
        return counted_in_the_loop()
    except Exception:  # noqa: BLE001 - the point of this test
        return []


def counted_by_a_loop_that_begins_anew() -> list[str]:
    found, lines = [], batches()
    for _ in range(3):
        try:
            found.append(next(lines))
        except StopIteration:
            lines = batches()
            found.append(next(lines))
    return found


@pytest.mark.parametrize(
    "loop",
    [
        counted_in_the_loop,
        counted_by_a_loop_that_begins_anew,
        counted_by_a_method,
        counted_in_a_function,
        counted_around_a_generator,
        counted_in_a_generator,
        counted_around_a_class,
        counted_in_a_program_that_handles_every_error,
    ],
)
def test_a_loop_whose_next_expects_no_end_counts_its_batches(loop: Callable[[], list[str]]) -> None:
    found = loop()
    assert len(found) == 3
    assert all(line.startswith("test_loop_shape.py:") for line in found)


def test_code_without_a_source_is_not_judged() -> None:
    names = {"batches": batches}
    exec("lines = batches()\nfound = [next(lines) for _ in range(3)]", names)
    assert set(names["found"]) == {""}  # type: ignore[arg-type]


def test_the_variables_of_the_loops_around_the_batches_are_known() -> None:
    seen: list[set[str]] = []

    def asked() -> Iterator[int]:
        for number in range(2):
            seen.append(loop_variables())
            yield number

    def train_one_epoch() -> None:
        for _batch, _number in enumerate(asked()):
            pass

    for _fold, (epoch, _) in enumerate([(3, ""), (4, "")]):
        for phase in ["train"]:
            train_one_epoch()
            assert f"{epoch} {phase}" in ("3 train", "4 train")
    here = "test_the_variables_of_the_loops_around_the_batches_are_known()"
    assert len(seen) == 4
    for names in seen:
        own = {name.removeprefix(f"{here}.") for name in names if name.startswith(f"{here}.")}
        assert own == {"_fold", "epoch", "_", "phase"}
        assert not any("train_one_epoch" in name for name in names)


def lines_that_collect() -> Iterator[str]:
    for _ in range(3):
        yield line_that_collects()


def by_generator() -> Iterator[str]:
    yield from lines_that_collect()


COLLECTING: list[Callable[[Any], Any]] = [
    lambda lines: [each.strip() for each in lines],
    lambda lines: {each.strip() for each in lines},
    lambda lines: {each.strip(): 1 for each in lines},
    lambda lines: list(lines),
    lambda lines: list(map(str, lines)),
    lambda lines: max(each for each in lines),
    lambda lines: max(lines, key=len),
    lambda lines: [*lines],
    lambda lines: {*lines},
    lambda lines: (lambda *some: some)(*lines),
    lambda lines: [number for number, _ in enumerate(lines)] and list(by_generator()),
]


@pytest.mark.parametrize("batches", [lines_that_collect, by_generator])
@pytest.mark.parametrize("collects", COLLECTING)
def test_what_collects_of_each_batch_is_found(collects: Callable[[Any], Any], batches: Callable[[], Any]) -> None:
    lines = collects(batches())
    found = lines if isinstance(lines, str) else next(iter(lines))
    assert found.startswith("test_loop_shape.py:")


def test_loops_collect_nothing() -> None:
    found = []
    for line in lines_that_collect():
        found.append(line)
    for line in map(str, by_generator()):
        found.append(line)
    for _, line in enumerate(each for each in lines_that_collect()):
        found.append(line)
    lines = lines_that_collect()
    while line := next(lines, "end"):
        if line == "end":
            break
    numbers = [1, 2]
    for _ in [*numbers]:
        found.append(next(lines_that_collect()))
    assert found == [""] * len(found)


def test_a_context_manager_that_is_left_collects_nothing() -> None:
    found = []

    @contextmanager
    def context() -> Iterator[None]:
        try:
            yield
        finally:
            found.append(line_that_collects())

    with context():
        pass
    with suppress(SystemExit), context():
        sys.exit(0)
    assert found == ["", ""]
