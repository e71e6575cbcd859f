"""--on-failure host: a lost worker takes its whole host out, for ever or until it has cooled down."""

from __future__ import annotations

import pytest

from farandole.base.events.host_events import HostBlacklisted, HostCooledDown
from farandole.base.events.worker_events import WorkerLost
from farandole.base.wire.link_messages import Abort
from farandole.base.wire.messages import ForwardToWorkers, Kill
from farandole.job.coordinator.transition import AgentLost
from tests.support.told_job import ToldJob


def hosts_job(num_proc: int = 2, **config: object) -> ToldJob:
    """Four workers on the hosts x and y, training."""
    config = {"on_failure": "host", "fills_slots": True, **config}
    return ToldJob(num_proc, slots=0, **config).offer(x=2, y=2).training()


def test_the_lost_worker_s_host_is_out_with_all_its_workers_in_the_same_regroup() -> None:
    told = hosts_job().exited("w0")
    assert [(kill.worker, kill.grace_s) for kill in told.sent(Kill)] == [("w1", 0.0)]
    (message,) = told.sent(ForwardToWorkers)
    assert isinstance(message.message, Abort)
    assert message.workers == ("w2", "w3")
    assert told.ready(2, "w2", "w3").members == ("w2", "w3")
    assert told.exited("w1").told() == {}
    assert told.spawned() == {}


def test_it_is_said_that_the_host_is_out_and_nothing_of_a_budget() -> None:
    told = hosts_job().exited("w0")
    (out,), (lost,) = told.logged(HostBlacklisted), told.logged(WorkerLost)
    assert out.line() == "host x is excluded permanently after 1 failure; stopping w1"
    assert lost.line() == "lost w0 (slot 0): it was killed by SIGKILL (signal 9)"


def test_the_whole_host_s_failure_counts_once() -> None:
    told = hosts_job().feed(AgentLost("x", "its host is silent"))
    (out,) = told.logged(HostBlacklisted)
    assert (out.failures, out.workers) == (1, ())
    assert told.ready(2, "w2", "w3").members == ("w2", "w3")


def test_what_a_stopped_worker_still_says_does_not_count() -> None:
    told = hosts_job().exited("w0").ready(2, "w1")
    assert told.actions == []
    assert told.raised("w1", "ValueError: x", exits=False).actions == []


def test_a_host_is_back_when_its_time_is_over_and_not_before() -> None:
    told = hosts_job(cooldown_range_s=(1.0, 2.0)).exited("w0").exited("w1").ready(2, "w2", "w3").synced("w2", "w3")
    assert told.deadline_in_s == 2.0  # twice the shortest time, and a little more; at most the longest
    assert told.passes(1.9).spawned() == {}
    assert told.passes(0.2).spawned() == {"w4": 0, "w5": 1}
    assert told.logged(HostCooledDown)[0].line() == "host x may be used again: its cool-down is over"


def test_every_further_failure_keeps_a_host_out_for_about_twice_as_long() -> None:
    told = ToldJob(1, slots=0, on_failure="host", fills_slots=True, cooldown_range_s=(1.0, 100.0))
    told.offer(x=1, y=1).training()
    times, worker = [], "w1"
    for _ in range(8):
        told.exited(worker)
        (out,) = told.logged(HostBlacklisted)
        assert out.cooldown_s is not None
        times.append(out.cooldown_s)
        (worker,) = told.passes(100.0).spawned()
    for doublings, time_s in enumerate(times, start=1):
        assert min(100.0, 2.0**doublings) <= time_s <= min(100.0, 2.0**doublings + 1.0)
    assert len({time_s % 1.0 for time_s in times[:5]}) == 5  # hosts do not come back all together


def test_a_newcomer_that_fails_takes_its_host_out_too() -> None:
    told = hosts_job().offer(x=2, y=2, z=2)
    assert told.spawned() == {"w4": 0, "w5": 1}
    told.exited("w4", 1)
    assert [event.host for event in told.logged(HostBlacklisted)] == ["z"]
    assert [kill.worker for kill in told.sent(Kill)] == ["w5"]
    assert told.told() == {}, "the members are not disturbed"


def test_a_worker_lost_on_a_host_that_was_to_be_left_anyway_is_not_held_against_it() -> None:
    told = hosts_job().offer(y=2).exited("w0")
    assert told.logged(HostBlacklisted) == []
    assert told.ready(3, "w1", "w2", "w3").members == ("w2", "w3")


def test_the_job_ends_at_once_when_all_hosts_are_out() -> None:
    told = hosts_job().exited("w0").exited("w2")
    assert told.ending[0] == 1


@pytest.mark.parametrize("may_change", [False, True])
def test_too_few_hosts_for_min_np_end_the_job_at_once_only_if_no_other_can_come(may_change: bool) -> None:
    told = hosts_job(4, min_np=4, elastic_timeout_s=5.0).offer(may_change, x=2, y=2).exited("w0")
    if may_change:
        assert told.job.ending is None
        assert told.ready(2, "w2", "w3").deadline_in_s == 5.0
        told.passes(5.0)
    assert "4 workers (--min-np) and had 2" in told.ending[1] or "4 workers (--min-np) and has 2" in told.ending[1]
    assert "x is excluded after failures" in told.ending[1]


def test_a_host_that_will_have_cooled_down_is_waited_for() -> None:
    told = hosts_job(4, min_np=4, cooldown_range_s=(1.0, 1.0)).offer(False, x=2, y=2).exited("w0").exited("w1")
    told.ready(2, "w2", "w3")
    assert told.job.ending is None
    assert told.passes(1.0).spawned() == {"w4": 0, "w5": 1}
    assert told.hello("w4", "w5").elastic("w4", "w5").members == ("w2", "w3", "w4", "w5")


def test_more_regroups_than_the_limit_end_the_job() -> None:
    told = ToldJob(3, reset_limit=1).training().exited("w0").ready(2, "w1", "w2").synced("w1", "w2").exited("w1")
    assert told.ending == (1, "The job was reset more often than --reset-limit 1 allows.")


def test_a_host_that_fails_before_the_first_generation_is_out_and_the_others_begin() -> None:
    told = ToldJob(2, slots=0, on_failure="host", fills_slots=True).offer(x=2, y=2).exited("w0", -9)
    assert [event.host for event in told.logged(HostBlacklisted)] == ["x"]
    assert told.exited("w1").hello("w2", "w3").members == ("w2", "w3")


def test_too_few_hosts_to_begin_with_end_the_job() -> None:
    told = ToldJob(3, slots=0, on_failure="host").offer(False, x=2, y=2).exited("w0", -9)
    assert "Training cannot begin with 3 workers (-np): " in told.ending[1]
