"""How a ledger is written: lines, numbers of samples, and their hash."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from farandole.training.ledger.records import Applied, Intent, Missed, Record, compact, decode, encode, expand, ids_hash


@pytest.mark.parametrize(
    ("ids", "compacted"),
    [
        ([], []),
        ([7], [7]),
        ([5, 3, 9], [5, 3, 9]),
        ([3, 4, 5, 6], [(3, 4)]),
        ([0, 1, 2, 3, 9, 10, 11], [(0, 4), (9, 3)]),
    ],
)
def test_ids_that_follow_each_other_become_runs(ids: list[int], compacted: list[int | tuple[int, int]]) -> None:
    assert compact(ids) == compacted
    assert expand(compacted).tolist() == ids


@given(st.lists(st.integers(0, 30), max_size=40))
def test_nothing_is_lost_by_compacting(ids: list[int]) -> None:
    assert expand(compact(ids)).tolist() == ids


@pytest.mark.parametrize(
    "record",
    [
        Intent(1, 2, 3, 0, 1, 24, 36, 24, 30, [5, 3, (7, 4)]),
        Applied(1, 2, 3, 1, 24, 36, 12, 2**64 - 1),
        Missed(3),
    ],
)
def test_a_record_is_a_line_and_a_line_a_record(record: Record) -> None:
    line = encode(record)
    assert line.endswith(b"\n")
    assert decode(line) == record


@pytest.mark.parametrize("line", [b"", b'["intent",1,2', b'["unknown",1]', b'["missed","x"]', b"\xff\xfe", b"12"])
def test_what_no_writer_wrote_is_no_record(line: bytes) -> None:
    assert decode(line) is None


@given(st.lists(st.integers(0, 2**40)), st.lists(st.integers(0, 2**40)))
def test_the_hash_of_the_whole_is_the_sum_of_the_shares(first: list[int], second: list[int]) -> None:
    assert ids_hash([*first, *second]) == (ids_hash(first) + ids_hash(second)) % 2**64


def test_the_hash_counts_how_often_a_sample_comes_and_never_changes() -> None:
    assert ids_hash([]) == 0
    assert ids_hash([4, 4]) != ids_hash([4])
    assert ids_hash([0]) == 0xE220A8397B1DCDAF  # splitmix64's first number from 0
