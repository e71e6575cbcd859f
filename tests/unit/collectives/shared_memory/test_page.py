"""Counters that processes wait on."""

from __future__ import annotations

import threading

import pytest

from farandole.clock import now_s
from farandole.collectives.shared_memory import futex
from farandole.collectives.shared_memory.meeting import Meeting
from farandole.collectives.shared_memory.page import PAGE_BYTES, Page
from farandole.collectives.shared_memory.segment import create_segment, open_segment

pytestmark = pytest.mark.skipif(not futex.is_supported(), reason="shared memory is for Linux on x86-64")


def pages(count: int) -> list[list[Page]]:
    """For each of `count` ranks the pages of all, its own to write."""
    made = [create_segment(PAGE_BYTES) for _ in range(count)]
    return [
        [Page(memory if mine == rank else open_segment(place)) for mine, (memory, place, _) in enumerate(made)]
        for rank in range(count)
    ]


def meetings(count: int) -> list[Meeting[str]]:
    return [Meeting(rank, each, lambda: None) for rank, each in enumerate(pages(count))]


def test_arrivals_are_counted_over_the_end_of_32_bits() -> None:
    (page,) = pages(1)[0]
    page._arrivals[0] = 2**32 - 1
    assert page.has_arrived(2**32 - 1)
    assert not page.has_arrived(2**32)
    page.arrive()
    assert page.has_arrived(2**32)
    assert page.has_arrived(2**32 - 1)
    assert not page.has_arrived(2**32 + 1)


def test_nobody_goes_on_before_all_have_come() -> None:
    ranks, passed, rounds = 3, [0, 0, 0], 300

    def run(rank: int, meeting: Meeting[str]) -> None:
        for number in range(1, rounds + 1):
            passed[rank] = number
            meeting.arrive()
            assert meeting.wait() is None
            assert min(passed) >= number

    threads = [threading.Thread(target=run, args=(r, m)) for r, m in enumerate(meetings(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert passed == [rounds] * ranks


def test_what_is_complete_counts_though_there_is_trouble() -> None:
    left, right = pages(2)
    first, second = Meeting(0, left, lambda: "trouble"), Meeting(1, right, lambda: "trouble")
    first.arrive()
    assert first.wait() == "trouble"
    second.arrive()
    assert second.wait() is None
    assert first.wait() is None


def test_trouble_that_comes_together_with_the_arrival_is_no_trouble() -> None:
    left, right = pages(2)
    second = Meeting(1, right, lambda: None)

    def look_around() -> str:
        second.arrive()  # the last thing that it did
        return "it is gone"

    first: Meeting[str] = Meeting(0, left, look_around)
    first.arrive()
    assert first.wait() is None


def test_wake_has_a_sleeping_rank_look_around_at_once() -> None:
    asked, trouble = threading.Event(), threading.Event()

    def look_around() -> str | None:
        asked.set()
        return "aborted" if trouble.is_set() else None

    meeting: Meeting[str] = Meeting(0, pages(2)[0], look_around)
    meeting.arrive()
    result: list[str | None] = []
    thread = threading.Thread(target=lambda: result.append(meeting.wait()))
    thread.start()
    assert asked.wait(10)
    trouble.set()
    begin_s = now_s()
    meeting.wake()
    thread.join(10)
    assert result == ["aborted"]
    assert now_s() - begin_s < 5
