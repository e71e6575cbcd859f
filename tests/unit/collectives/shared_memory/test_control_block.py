"""Counters that processes wait on."""

from __future__ import annotations

import threading

import pytest

from farandole.base.machine import now_s
from farandole.training.collectives.control_blocks import CONTROL_BLOCK_BYTES, ControlBlock, MemoryBarrier
from farandole.training.collectives.shared_memory_tensors import can_share_memory, create_segment, open_segment

pytestmark = pytest.mark.skipif(not can_share_memory(), reason="shared memory is for Linux on x86-64")


def control_blocks(count: int) -> list[list[ControlBlock]]:
    """For each of `count` ranks the control blocks of all, its own to write."""
    made = [create_segment(CONTROL_BLOCK_BYTES) for _ in range(count)]
    return [
        [ControlBlock(memory if mine == rank else open_segment(place)) for mine, (memory, place, _) in enumerate(made)]
        for rank in range(count)
    ]


def barriers(count: int) -> list[MemoryBarrier[str]]:
    return [MemoryBarrier(rank, each, lambda: None) for rank, each in enumerate(control_blocks(count))]


def test_arrivals_are_counted_over_the_end_of_32_bits() -> None:
    (control_block,) = control_blocks(1)[0]
    control_block._arrivals[0] = 2**32 - 1
    assert control_block.has_arrived(2**32 - 1)
    assert not control_block.has_arrived(2**32)
    control_block.arrive()
    assert control_block.has_arrived(2**32)
    assert control_block.has_arrived(2**32 - 1)
    assert not control_block.has_arrived(2**32 + 1)


def test_nobody_goes_on_before_all_have_come() -> None:
    ranks, passed, rounds = 3, [0, 0, 0], 300

    def run(rank: int, barrier: MemoryBarrier[str]) -> None:
        for number in range(1, rounds + 1):
            passed[rank] = number
            barrier.arrive()
            assert barrier.wait() is None
            assert min(passed) >= number

    threads = [threading.Thread(target=run, args=(r, m)) for r, m in enumerate(barriers(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert passed == [rounds] * ranks


def test_what_is_complete_counts_though_there_is_trouble() -> None:
    left, right = control_blocks(2)
    first, second = MemoryBarrier(0, left, lambda: "trouble"), MemoryBarrier(1, right, lambda: "trouble")
    first.arrive()
    assert first.wait() == "trouble"
    second.arrive()
    assert second.wait() is None
    assert first.wait() is None


def test_trouble_that_comes_together_with_the_arrival_is_no_trouble() -> None:
    left, right = control_blocks(2)
    second = MemoryBarrier(1, right, lambda: None)

    def look_around() -> str:
        second.arrive()  # the last thing that it did
        return "it is gone"

    first: MemoryBarrier[str] = MemoryBarrier(0, left, look_around)
    first.arrive()
    assert first.wait() is None


def test_wake_has_a_sleeping_rank_look_around_at_once() -> None:
    asked, trouble = threading.Event(), threading.Event()

    def look_around() -> str | None:
        asked.set()
        return "aborted" if trouble.is_set() else None

    barrier: MemoryBarrier[str] = MemoryBarrier(0, control_blocks(2)[0], look_around)
    barrier.arrive()
    result: list[str | None] = []
    thread = threading.Thread(target=lambda: result.append(barrier.wait()))
    thread.start()
    assert asked.wait(10)
    trouble.set()
    begin_s = now_s()
    barrier.wake()
    thread.join(10)
    assert result == ["aborted"]
    assert now_s() - begin_s < 5
