"""How jobs end: finished together, failed afterwards, stopped by a person."""

from __future__ import annotations

import pytest

from farandole.base.events.job_events import ExitsAwaited, TrainingCutShort
from farandole.base.membership import Shortfall
from farandole.base.wire.link_messages import Leaving
from farandole.base.wire.messages import JobOver, Kill
from farandole.job.coordinator.transition import StopRequested
from tests.support.told_job import ToldJob


def test_all_are_released_when_the_last_one_has_finished_and_the_job_succeeds() -> None:
    told = ToldJob(2).training().finished("w0")
    assert told.told() == {}
    assert told.finished("w1").told() == {"w0": ["Released"], "w1": ["Released"]}
    end = told.exited("w0", 0).exited("w1", 0).end
    assert end is not None
    assert (end.exit_code, end.reason) == (0, "2 workers finished the training.")
    assert told.sent(JobOver)


def test_what_was_promised_and_not_done_is_told_once_when_all_have_finished() -> None:
    """Members tell the same; where they do not, what is left of the most counts."""
    told = ToldJob(2).training().finished("w0", shortfall=Shortfall(4, 2, 40, 20))
    assert told.logged(TrainingCutShort) == []
    told.finished("w1", shortfall=Shortfall(4, 3, 40, 30))
    assert told.logged(TrainingCutShort) == [TrainingCutShort(4, 3, 40, 30)]
    again = ToldJob(3).training().finished("w0", shortfall=Shortfall(4, 2, 40, 20)).exited("w2")
    again.ready(2, "w0", "w1").finished("w0", "w1")  # and then they have done all
    assert again.job.is_released
    assert again.logged(TrainingCutShort) == []


def test_a_failure_after_the_release_is_reported_and_not_restarted() -> None:
    told = ToldJob(2).training().finished("w0", "w1").exited("w0", 3)
    assert (told.spawned(), told.told()) == ({}, {})
    end = told.exited("w1", 0).end
    assert end is not None
    assert end.exit_code == 1
    assert "w0 (slot 0) exited with code 3" in end.reason


def test_workers_that_do_not_end_are_named_once() -> None:
    told = ToldJob(2).training().finished("w0", "w1").exited("w0", 0)
    assert told.passes(9.0).logged(ExitsAwaited) == []
    assert told.passes(1.0).logged(ExitsAwaited) == [ExitsAwaited(("w1",), 10.0)]
    assert told.deadline_in_s is None
    assert told.passes(60.0).logged(ExitsAwaited) == []
    assert told.exited("w1", 0).ending[0] == 0


def test_a_death_before_the_release_is_a_loss_and_finishing_is_done_again() -> None:
    told = ToldJob(3).training().finished("w0", "w1").exited("w2")
    assert told.told() == {"w0": ["Abort"], "w1": ["Abort"]}
    assert told.spawned() == {}
    told.ready(2, "w0", "w1").finished("w0")
    assert told.told() == {}
    assert told.finished("w1").told() == {"w0": ["Released"], "w1": ["Released"]}


def test_nobody_is_admitted_after_the_first_finished() -> None:
    told = ToldJob(3).training().exited("w1").ready(2, "w0", "w2").hello("w3").finished("w0")
    assert told.elastic("w3").told() == {}
    assert told.finished("w2").told() == {"w0": ["Released"], "w2": ["Released"], "w3": ["Left"]}
    told.passes(told.config.grace_s)  # one that does not go is killed
    assert [kill.worker for kill in told.sent(Kill)] == ["w3"]


def test_a_finishing_job_below_min_np_gets_a_replacement_all_the_same() -> None:
    told = ToldJob(2, min_np=2).training().finished("w0").exited("w1")
    assert told.spawned() == {"w2": 1}
    told.ready(2, "w0").hello("w2").elastic("w2")
    assert told.members == ("w0", "w2")


def test_a_planned_change_is_dropped_when_all_finish_before_their_boundary() -> None:
    told = ToldJob(2).training().says("w1", Leaving()).finished("w0", "w1")
    assert told.told() == {"w0": ["Released"], "w1": ["Released"]}


def test_members_that_are_ready_are_not_left_waiting_for_one_that_finished() -> None:
    told = ToldJob(3).training().says("w2", Leaving()).finished("w0").ready(2, "w1", "w2")
    assert told.told() == {f"w{i}": ["Abort"] for i in range(3)}
    assert told.ready(3, "w0", "w1", "w2").members == ("w0", "w1")


def test_finished_in_an_old_generation_does_not_count() -> None:
    told = ToldJob(2).training().exited("w1").finished("w0")
    assert told.told() == {}
    assert not told.job.is_released


def test_ctrl_c_gives_the_workers_their_grace_and_ends_the_job_with_130() -> None:
    told = ToldJob(2, grace_s=5).training().feed(StopRequested(False, "Stopped by Ctrl-C."))
    assert [(kill.worker, kill.grace_s) for kill in told.sent(Kill)] == [("w0", 5), ("w1", 5)]
    assert told.end is None
    end = told.exited("w0", -15).exited("w1", -15).end
    assert end is not None
    assert (end.exit_code, end.reason) == (130, "Stopped by Ctrl-C.")


def test_a_second_ctrl_c_ends_the_job_at_once() -> None:
    told = ToldJob(2).training().feed(StopRequested(False, "Stopped by Ctrl-C."))
    told.feed(StopRequested(True, "Stopped by Ctrl-C again."))
    assert [(kill.worker, kill.grace_s) for kill in told.sent(Kill)] == [("w0", 0.0), ("w1", 0.0)]
    assert told.end is not None
    assert told.end.exit_code == 130


def test_a_worker_that_never_exits_does_not_keep_the_job_from_ending() -> None:
    told = ToldJob(1, grace_s=5).training().feed(StopRequested(False, "Stopped by Ctrl-C."))
    deadline_in_s = told.deadline_in_s
    assert deadline_in_s is not None
    assert told.passes(deadline_in_s).end is not None


@pytest.mark.parametrize("worker", ["w0", "w1"])
def test_nothing_happens_after_the_end(worker: str) -> None:
    told = ToldJob(2).training().feed(StopRequested(True, "Stopped by Ctrl-C."))
    before = told.job
    assert told.exited(worker).job == before
    assert told.actions == []
    assert told.deadline_in_s is None


def test_a_fault_after_the_first_finished_admits_nobody_either() -> None:
    told = ToldJob(3).training().exited("w1").ready(2, "w0", "w2").synced("w0", "w2").hello("w3")
    told.finished("w0").elastic("w3").exited("w2").ready(3, "w0")
    assert told.members == ("w0",)


def test_finished_that_crossed_an_abort_releases_nobody_since_ready_follows() -> None:
    told = ToldJob(2).training().link_broken("w0", "w1").passes(0.5).finished("w0", "w1")
    assert told.told() == {}
    assert told.ready(2, "w0", "w1").number == 2


def test_finished_from_a_worker_that_is_ready_for_the_next_generation_changes_nothing() -> None:
    told = ToldJob(2).training().says("w1", Leaving()).ready(2, "w0")
    before = told.job
    assert told.finished("w0").job == before
