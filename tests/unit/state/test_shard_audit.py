"""The audit of shards: who computes what again, and who was wrong."""

from __future__ import annotations

from collections import Counter

import pytest

from farandole.training.collectives.shard_tree import divide, divide_evenly
from farandole.training.state.shard_audit import Audit, AuditRule, Claim, Inquiry, judge

AUDIT = Audit(shards=(1, 2, 5), shift=1)


@pytest.mark.parametrize(("world", "shards"), [(2, 2), (2, 8), (3, 8), (4, 4), (7, 12)])
def test_each_rank_computes_a_shard_of_another_one_again(world: int, shards: int) -> None:
    division = divide_evenly(shards, world)
    rule = AuditRule(1.0, 5)
    audits = [audit for start in range(500) if (audit := rule.draw(division, 3, start)) is not None]
    assert len(audits) == 500
    for audit in audits:
        for rank, (first, stop) in enumerate(division.ranges):
            assert first <= audit.shards[rank] < stop
            assert audit.auditor(rank) != rank
            assert audit.again(audit.auditor(rank)) == audit.shards[rank]
    assert len({audit.shards for audit in audits}) > 1 or shards == world
    assert {audit.shift for audit in audits} == set(range(1, world))


def test_a_fraction_of_all_shards_is_audited_equally_often() -> None:
    division, rule = divide_evenly(12, 3), AuditRule(0.05, 7)
    drawn = [rule.draw(division, epoch, start) for epoch in range(20) for start in range(1000)]
    counts = Counter(shard for audit in drawn if audit is not None for shard in audit.shards)
    assert set(counts) == set(range(12))
    assert all(0.04 < count / len(drawn) < 0.06 for count in counts.values())


def test_nothing_is_audited_where_no_other_rank_could_or_where_nobody_asked_for_it() -> None:
    assert AuditRule(1.0, 5).draw(divide_evenly(8, 1), 0, 0) is None
    assert AuditRule(0.0, 5).draw(divide_evenly(8, 4), 0, 0) is None


def test_a_rank_without_shards_is_not_audited() -> None:
    division = divide(2, (1, 0, 1))
    audit = AuditRule(1.0, 5).draw(division, 0, 0)
    assert audit is not None
    assert audit.shards == (0, -1, 1)


def test_a_further_round_has_the_same_shards_and_other_auditors() -> None:
    division = divide_evenly(12, 4)
    rounds = [AuditRule(0.01, 5, number).draw(division, 0, 36) for number in (1, 2, 3)]
    first = AuditRule(1.0, 5).draw(division, 0, 36)
    assert first is not None
    assert {each.shards for each in rounds if each is not None} == {first.shards}
    assert [each.shift % 3 for each in rounds if each is not None] == [(first.shift + more) % 3 for more in (1, 2, 3)]


@pytest.mark.parametrize(
    ("results", "is_last", "culprits"),
    [
        pytest.param([(0, 1), (1, 2)], True, None, id="one word against another"),
        pytest.param([(0, 1), (1, 2), (0, 1), (2, 2)], False, {0}, id="a third rank agrees with the second one"),
        pytest.param([(0, 1), (1, 2), (0, 1), (2, 1)], False, {1}, id="a third rank agrees with the first one"),
        pytest.param([(0, 1), (1, 2), (0, 2), (1, 2)], False, {0}, id="one of two was wrong once"),
        pytest.param([(0, 1), (1, 2), (0, 3), (1, 2)], False, None, id="one of two is always wrong, so far"),
        pytest.param([(0, 1), (1, 2), (0, 3), (1, 2)], True, {0}, id="one of two cannot repeat its results"),
        pytest.param([(0, 1), (1, 2), (0, 1), (1, 2)], True, None, id="both of two can"),
        pytest.param([(0, 1), (1, 2), (0, 3), (1, 4)], True, None, id="neither of two can"),
        pytest.param([(0, 1), (1, 2), (0, 1), (2, 3)], True, None, id="three results"),
        pytest.param([(0, 1), (1, 2), (0, 3), (2, 2)], False, {0}, id="another wrong result each time"),
        pytest.param([(0, 1), (1, 2), (0, 2), (1, 3)], True, None, id="each of two has had the other one's result"),
    ],
)
def test_the_results_tell_who_was_wrong(
    results: list[tuple[int, int]], is_last: bool, culprits: set[int] | None
) -> None:
    assert judge([Claim(*each) for each in results], is_last) == culprits


def test_equal_results_need_no_inquiry() -> None:
    assert not Inquiry(AUDIT, own=[7, 8, 9], again=[8, 9, 7]).is_open


def test_an_inquiry_names_the_pairs_that_differ() -> None:
    inquiry = Inquiry(AUDIT, own=[7, 8, 9], again=[8, 1, 7])
    assert inquiry.is_open
    assert inquiry.pairs == [(2, 1)]
