"""Scripts that never enter an elastic function: nothing is survived, and nothing is started again."""

from __future__ import annotations

from farandole.wire.messages import Kill, LinkBroken
from tests.support.told_job import ToldJob


def test_a_death_ends_the_job_and_stops_the_others() -> None:
    told = ToldJob(3).hello("w0", "w1", "w2").exited("w1", -9)
    assert told.ending[0] == 1
    assert "w1 (slot 1) was killed by SIGKILL (signal 9)" in told.ending[1]
    assert {kill.worker for kill in told.sent(Kill)} == {"w0", "w2"}
    assert told.told() == {"w0": ["Stop"], "w2": ["Stop"]}
    assert told.spawned() == {}


def test_the_job_ends_with_the_worker_s_own_exit_code() -> None:
    assert ToldJob(2).hello("w0", "w1").exited("w1", 7).ending[0] == 7


def test_the_exception_is_named() -> None:
    told = ToldJob(2).hello("w0", "w1").raised("w1", "ValueError: bad batch")
    assert "having raised ValueError: bad batch" in told.ending[1]


def test_exit_code_0_waits_for_the_others_and_all_of_them_are_a_success() -> None:
    told = ToldJob(2).hello("w0", "w1").exited("w0", 0)
    assert told.job.ending is None
    assert told.spawned() == {}
    end = told.exited("w1", 0).end
    assert end is not None
    assert end.exit_code == 0


def test_a_death_after_another_s_exit_code_0_ends_the_job_with_1() -> None:
    assert ToldJob(2).hello("w0", "w1").exited("w0", 0).exited("w1", -11).ending[0] == 1


def test_reports_of_broken_links_are_left_to_the_workers_own_errors() -> None:
    told = ToldJob(2).hello("w0", "w1").says("w0", LinkBroken(1, "w1", "receive", "end of file"))
    assert told.deadline_in_s is None
    assert told.passes(10).job.ending is None


def test_an_exit_with_0_before_the_others_enter_the_elastic_function_is_a_loss_after_all() -> None:
    told = ToldJob(2).hello("w0", "w1").exited("w0", 0).elastic("w1")
    assert told.told() == {"w1": ["Abort"]}
    told.ready(2, "w1")
    assert told.members == ("w1",)
    assert told.spawned() == {"w2": 0}
