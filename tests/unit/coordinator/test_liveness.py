"""Silence is judged by a clock that does not run while the coordinator itself could not."""

from __future__ import annotations

from farandole.job.coordinator.decision_loop import JobClock
from farandole.job.coordinator.heartbeat_port import Silence


class HandClock:
    """A clock that a test moves by hand."""

    def __init__(self) -> None:
        self.time_s = 100.0

    def __call__(self) -> float:
        return self.time_s


def test_an_agent_is_lost_after_two_looks_within_the_budget() -> None:
    silence = Silence(budget_s=2.0)
    silence.record("a", 0.0)
    looks = [n * silence.look_every_s for n in range(25)]
    lost_at = [now_s for now_s in looks if silence.look(now_s)]
    assert 1.8 <= lost_at[0] <= 2.0


def test_an_agent_heard_between_two_looks_is_not_lost() -> None:
    silence = Silence(budget_s=2.0)
    silence.record("a", 0.0)
    assert silence.look(1.9) == {}
    silence.record("a", 1.95)
    assert silence.look(2.0) == {}


def test_a_forgotten_agent_is_never_lost() -> None:
    silence = Silence(budget_s=2.0)
    silence.record("a", 0.0)
    silence.forget("a")
    assert [silence.look(5.0), silence.look(6.0)] == [{}, {}]


def test_the_time_of_a_stall_does_not_count() -> None:
    wall = HandClock()
    clock = JobClock(wall, tolerance_s=0.5)
    clock.expect_look(0.1)
    wall.time_s += 30.1
    assert 29.9 < clock.notice_stall() < 30.1
    assert 100.0 < clock.now_s() < 100.2
    assert clock.notice_stall() == 0.0


def test_a_little_lateness_is_no_stall() -> None:
    wall = HandClock()
    clock = JobClock(wall, tolerance_s=0.5)
    clock.expect_look(0.1)
    wall.time_s += 0.5
    assert clock.notice_stall() == 0.0
    assert clock.now_s() == 100.5


def test_a_stalled_coordinator_gives_its_agents_their_budget_again() -> None:
    wall, silence = HandClock(), Silence(budget_s=2.0)
    clock = JobClock(wall, tolerance_s=0.5)
    silence.record("a", clock.now_s())
    clock.expect_look(0.1)
    wall.time_s += 60.0
    clock.notice_stall()
    assert [silence.look(clock.now_s()) for _ in range(2)] == [{}, {}]
