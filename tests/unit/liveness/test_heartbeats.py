"""Heartbeats in both directions: what is known of the other side, and what forged or old datagrams cannot pretend."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from farandole.base.liveness.heartbeats import (
    HEARTBEAT_ID_BYTES,
    Heartbeats,
    HeartbeatSeal,
    heartbeat_id_of,
    heartbeat_period_s,
)
from farandole.base.wire.authentication import Role, new_token

TOKEN, HEARTBEAT_ID = new_token(), b"i" * HEARTBEAT_ID_BYTES


def sides() -> tuple[HeartbeatSeal, HeartbeatSeal]:
    return HeartbeatSeal(TOKEN, HEARTBEAT_ID, Role.DIALER), HeartbeatSeal(TOKEN, HEARTBEAT_ID, Role.LISTENER)


def test_a_beat_that_was_acknowledged_tells_when_both_directions_worked() -> None:
    ours = Heartbeats(10.0)
    assert [ours.next(11.0), ours.next(12.0), ours.next(13.0)] == [1, 2, 3]
    assert ours.record(sequence=7, received=2)
    assert (ours.reached_s, ours.received) == (12.0, 7)


def test_beats_that_acknowledge_nothing_tell_nothing_of_the_way_there() -> None:
    ours = Heartbeats(10.0)
    ours.next(11.0)
    assert not ours.record(sequence=1, received=0)
    assert not ours.record(sequence=2, received=0)
    assert (ours.reached_s, ours.received) == (10.0, 2)


def test_the_same_beat_on_another_way_and_an_old_one_change_nothing() -> None:
    ours = Heartbeats(10.0)
    for now_s in (11.0, 12.0):
        ours.next(now_s)
    assert ours.record(5, 2)
    assert not ours.record(5, 2)
    assert not ours.record(4, 1)
    assert (ours.reached_s, ours.received) == (12.0, 5)


def test_what_nobody_ever_hears_is_not_remembered_for_ever() -> None:
    ours = Heartbeats(0.0)
    for now in range(1, 5001):
        ours.next(float(now))
    assert len(ours._sent) <= 1000
    assert ours.record(1, 4990)
    assert ours.reached_s == 4990.0
    assert not ours.record(2, 3000)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20))))
def test_the_time_of_the_last_answer_never_goes_back(heard: list[tuple[int, int]]) -> None:
    ours, before_s = Heartbeats(0.0), 0.0
    for now, (sequence, acknowledged) in enumerate(heard, start=1):
        ours.next(float(now))
        ours.record(sequence, acknowledged)
        assert before_s <= ours.reached_s <= now
        before_s = ours.reached_s


def test_a_budget_has_room_for_ten_beats() -> None:
    assert heartbeat_period_s(0.3) == pytest.approx(0.03)
    assert heartbeat_period_s(60.0) == 0.5


def test_the_heartbeats_of_many_agents_are_rarer_but_never_rarer_than_four_in_a_budget() -> None:
    assert heartbeat_period_s(3.0, agents=200) == pytest.approx(0.3)
    assert heartbeat_period_s(3.0, agents=400) == pytest.approx(0.6)
    assert heartbeat_period_s(3.0, agents=10_000) == pytest.approx(0.75)
    assert heartbeat_period_s(0.3, agents=10_000) == pytest.approx(0.075)
    assert heartbeat_period_s(60.0, agents=4096) == pytest.approx(6.144)


def test_a_datagram_goes_from_one_end_to_the_other() -> None:
    agent, coordinator = sides()
    assert coordinator.open(agent.seal(3, 2)) == (3, 2)
    assert agent.open(coordinator.seal(1 << 40, 0)) == (1 << 40, 0)
    assert heartbeat_id_of(agent.seal(3, 2)) == HEARTBEAT_ID


def test_a_datagram_is_not_taken_from_ones_own_side_nor_under_another_token_or_id() -> None:
    agent, coordinator = sides()
    assert agent.open(agent.seal(3, 2)) is None
    assert coordinator.open(HeartbeatSeal(new_token(), HEARTBEAT_ID, Role.DIALER).seal(3, 2)) is None
    assert coordinator.open(HeartbeatSeal(TOKEN, b"j" * HEARTBEAT_ID_BYTES, Role.DIALER).seal(3, 2)) is None


@given(st.binary(max_size=80))
def test_no_other_bytes_are_a_beat(data: bytes) -> None:
    assert sides()[1].open(data) is None


def test_no_bit_of_a_datagram_can_be_changed() -> None:
    agent, coordinator = sides()
    sealed = agent.seal(3, 2)
    for bit in range(8 * len(sealed)):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << bit % 8
        assert coordinator.open(bytes(changed)) is None
