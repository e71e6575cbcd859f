"""A script whose gradients depend on the number of workers: lost ones are waited for, as long as they can come."""

from __future__ import annotations

from farandole.base.events.job_events import NumberOfWorkersFixed, NumberOfWorkersFreed
from farandole.base.wire.control import AskScale, Declined
from farandole.base.wire.link_messages import WorkersFixed
from farandole.job.coordinator.control_requests import judge
from tests.support.told_job import ToldJob

FIXED = WorkersFixed(3, "train.py:9: gradients flow through a gathered tensor")


def test_the_others_wait_for_the_replacement_of_a_lost_worker() -> None:
    told = ToldJob(3).training().says("w0", FIXED)
    [event] = told.logged(NumberOfWorkersFixed)
    assert event.line().endswith(FIXED.because)
    told.exited("w1").ready(2, "w0", "w2")
    assert told.starts() == {}
    assert set(told.hello("w3").elastic("w3").starts()) == {"w0", "w2", "w3"}


def test_it_is_said_once() -> None:
    told = ToldJob(3).training().says("w0", FIXED)
    assert told.logged(NumberOfWorkersFixed)
    assert not told.says("w0", FIXED).logged(NumberOfWorkersFixed)


def test_a_worker_that_is_dying_is_one_that_can_be_replaced() -> None:
    told = ToldJob(3).training().says("w0", FIXED).raised("w1", "ValueError: once", exits=False).ready(2, "w0", "w2")
    assert told.starts() == {}
    assert told.logged(NumberOfWorkersFreed) == []


def test_without_a_replacement_the_others_go_on_at_once() -> None:
    told = ToldJob(3, restarts=0).training().says("w0", FIXED).exited("w1").ready(2, "w0", "w2")
    assert set(told.starts()) == {"w0", "w2"}


def test_when_the_last_replacement_fails_the_others_go_on() -> None:
    told = ToldJob(3, restarts=1).training().says("w0", FIXED).exited("w1").ready(2, "w0", "w2")
    assert told.starts() == {}
    told.exited("w3")
    assert [event.workers for event in told.logged(NumberOfWorkersFreed)] == [3]
    assert set(told.starts()) == {"w0", "w2"}
    assert told.says("w0", FIXED).logged(NumberOfWorkersFixed) == [], "it goes on with fewer, and is static by then"


def test_after_the_elastic_timeout_the_others_go_on() -> None:
    told = ToldJob(3, elastic_timeout_s=60).training().says("w0", FIXED).exited("w1").ready(2, "w0", "w2").hello("w3")
    assert told.deadline_in_s is not None
    assert set(told.passes(60).starts()) == {"w0", "w2"}


def test_no_worker_joins_beyond_this_number() -> None:
    told = ToldJob(3, max_np=4).training().says("w0", FIXED)
    declined = judge(told.job, AskScale(4))
    assert isinstance(declined, Declined)
    assert FIXED.because in declined.reason


def test_where_the_host_is_excluded_the_others_go_on_as_well() -> None:
    told = ToldJob(3, slots=0, on_failure="host").offer(False, x=2, y=1).training().says("w0", FIXED)
    told.exited("w2", -9)
    assert [event.workers for event in told.logged(NumberOfWorkersFreed)] == [3]
    assert set(told.ready(2, "w0", "w1").starts()) == {"w0", "w1"}
