"""Which bytes are hashed at which step."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, strategies as st

from farandole.training.state.state_digest import BLOCKS, EVERY, HEAD_BYTES, TURN, block_at, cut, is_due, sample_at

pytestmark = pytest.mark.core

SIZES = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 1 << 22)), max_size=300)


@given(SIZES)
def test_each_byte_is_in_one_block(sizes: list[int]) -> None:
    blocks = cut(sizes)
    assert 1 <= len(blocks) <= BLOCKS
    parts = sorted(part for block in blocks for part in block)
    for place, size in enumerate(sizes):
        ends = [(start, stop) for at, start, stop in parts if at == place]
        assert [start for start, _ in ends] == [0, *(stop for _, stop in ends)][: len(ends)]
        assert (ends[-1][1] if ends else 0) == size


@given(SIZES)
def test_no_block_takes_much_longer_than_the_others(sizes: list[int]) -> None:
    blocks = cut(sizes)
    times = [sum(part.stop - part.start + 16_384 for part in block) for block in blocks]
    assert max(times) <= (sum(sizes) + 16_384 * len(sizes)) / len(blocks) + 2 * 16_384 + 64


def test_a_turn_hashes_every_block_once_from_wherever_it_begins() -> None:
    for first in (0, 17, 250):
        due = [block_at(step, BLOCKS) for step in range(first, first + TURN) if is_due(step)]
        assert Counter(due) == dict.fromkeys(range(BLOCKS), 1)


def test_a_tiny_state_is_hashed_whole_each_time() -> None:
    assert len(cut([800, 40])) == 1
    assert is_due(8)
    assert not is_due(8 + EVERY // 2)


def test_the_sample_of_a_small_state_is_all_of_it() -> None:
    sizes = [4_000_000, 12]
    assert [tuple(part) for part in sample_at(5, sizes, cut(sizes))] == [(0, 0, 4_000_000), (1, 0, 12)]


def test_the_sample_of_a_large_state_is_the_beginning_of_each_tensor_and_a_block_in_turn() -> None:
    sizes = [40 << 20, 12, 100_000]
    blocks = cut(sizes)
    sample = sample_at(6 * EVERY, sizes, blocks)
    assert [tuple(part) for part in sample[:3]] == [(0, 0, HEAD_BYTES), (1, 0, 12), (2, 0, HEAD_BYTES)]
    assert sample[3][:2] == blocks[6][0][:2]
    assert sum(stop - start for _, start, stop in sample[3:]) == min(1 << 20, sum(b - a for _, a, b in blocks[6]))


def test_the_sample_of_very_many_tensors_has_some_of_them_in_turn() -> None:
    sizes = [100_000] * 1_000
    blocks = cut(sizes)
    samples = [sample_at(step, sizes, blocks) for step in range(3)]
    assert all(len(each) < 420 for each in samples)
    heads = {part.place for each in samples for part in each if part[1:] == (0, HEAD_BYTES)}
    assert heads == set(range(1_000))
