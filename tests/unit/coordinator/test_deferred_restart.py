"""After a fault a lost worker's replacement is started when the survivors train again."""

from __future__ import annotations

from farandole.base.wire.link_messages import Leaving
from farandole.base.wire.messages import WorkerDying
from farandole.job.coordinator.transition import AgentReported
from tests.support.told_job import ToldJob


def training_job(size: int = 3, **config: int) -> ToldJob:
    told = ToldJob(size, deferred_restart_s=1.0, **config).training()
    told.now_s += 100.0
    return told


def test_a_replacement_is_started_when_the_last_survivor_has_applied_a_step() -> None:
    told = training_job().exited("w1")
    assert told.spawned() == {}
    told.ready(2, "w0", "w2").synced("w0", "w2")
    assert told.stepped("w0").spawned() == {}
    assert told.stepped("w2").spawned() == {"w3": 1}
    assert told.deadline_in_s is None


def test_but_not_before_the_exit_that_frees_the_slot() -> None:
    told = training_job().feed(AgentReported("a", WorkerDying("w1")))
    told.ready(2, "w0", "w2").synced("w0", "w2").stepped("w0", "w2")
    assert told.spawned() == {}
    assert told.exited("w1").spawned() == {"w3": 1}


def test_survivors_that_take_long_are_not_waited_for() -> None:
    told = training_job().exited("w1").ready(2, "w0", "w2").synced("w0", "w2").stepped("w0")
    assert told.deadline_in_s == 1.0
    assert told.passes(0.9).spawned() == {}
    assert told.passes(0.1).spawned() == {"w3": 1}
    assert told.deadline_in_s is None


def test_further_faults_do_not_prolong_the_wait() -> None:
    told = training_job(4).exited("w1").passes(0.75).exited("w2")
    assert told.deadline_in_s == 0.25
    assert told.passes(0.25).spawned() == {"w4": 1, "w5": 2}


def test_whom_the_job_cannot_go_on_without_is_replaced_at_once() -> None:
    assert training_job(3, min_np=3).exited("w1").spawned() == {"w3": 1}
    assert training_job(3, min_np=2).exited("w1").spawned() == {}
    told = training_job(3, min_np=2).exited("w1")
    assert told.exited("w2").spawned() == {"w3": 1, "w4": 2}


def test_a_survivor_that_is_asked_to_leave_is_none_to_wait_for() -> None:
    told = training_job(2).exited("w1")
    assert told.spawned() == {}
    assert told.says("w0", Leaving()).spawned() == {"w2": 1}
