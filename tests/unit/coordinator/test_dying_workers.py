"""A worker's death is known before its exit: the others go on at once, and the rest follows with the exit."""

from __future__ import annotations

from farandole.base.events.job_events import TrainingCutShort
from farandole.base.events.worker_events import WorkerLost
from farandole.base.wire.control import AskScale
from farandole.base.wire.link_messages import Failed
from farandole.base.wire.messages import WorkerDying
from farandole.job.coordinator.transition import AgentReported
from tests.support.told_job import ToldJob


def dying(told: ToldJob, worker: str) -> ToldJob:
    return told.feed(AgentReported("a", WorkerDying(worker)))


def test_survivors_go_on_before_the_exit_is_known() -> None:
    told = dying(ToldJob(3).training(), "w1")
    assert told.told() == {"w0": ["Abort"], "w2": ["Abort"]}
    told.ready(2, "w0", "w2")
    assert told.members == ("w0", "w2")


def test_the_slot_is_free_only_once_the_exit_is_known() -> None:
    told = dying(ToldJob(3).training(), "w1")
    assert told.spawned() == {}
    told.ready(2, "w0", "w2")
    assert told.spawned() == {}
    told.exited("w1", -9)
    assert told.spawned() == {"w3": 1}
    assert [loss.how for loss in told.logged(WorkerLost)] == ["was killed by SIGKILL (signal 9)"]


def test_the_exit_of_a_dying_worker_aborts_nothing_a_second_time() -> None:
    told = dying(ToldJob(3).training(), "w1")
    told.exited("w1", -9)
    assert told.told() == {}
    assert told.job.change is not None
    assert told.job.change.number == 2


def test_an_exit_that_was_not_hinted_at_aborts_as_ever() -> None:
    told = ToldJob(3).training().exited("w1", -9)
    assert told.told() == {"w0": ["Abort"], "w2": ["Abort"]}


def test_a_hint_about_no_member_changes_nothing() -> None:
    told = ToldJob(2, slots=3, max_np=3, restarts=0).training()
    before = told.job
    assert dying(told, "w9").job == before
    told.exited("w1", -9)
    before = told.job
    assert dying(told, "w1").job == before


def test_a_second_hint_changes_nothing() -> None:
    told = dying(ToldJob(3).training(), "w1")
    before = told.job
    assert dying(told, "w1").job == before


def test_a_static_script_waits_for_the_exit() -> None:
    told = ToldJob(2).hello("w0", "w1")
    assert dying(told, "w1").job.ending is None
    assert told.told() == {}


def test_what_a_dying_worker_is_heard_to_say_does_not_count() -> None:
    told = dying(ToldJob(3).training(), "w1")
    told.ready(2, "w0", "w1")
    assert told.members == ("w0", "w1", "w2"), "w2 has not said READY"


def test_when_all_are_dying_the_job_ends_with_how_they_ended() -> None:
    told = dying(dying(ToldJob(2, restarts=0).training(), "w0"), "w1")
    assert told.job.ending is None
    told.exited("w0", -9)
    assert told.job.ending is None
    told.exited("w1", -11)
    code, reason = told.ending
    assert code == 1
    assert "SIGKILL" in reason
    assert "SIGSEGV" in reason


def test_when_all_end_well_by_themselves_the_job_ends_with_success() -> None:
    told = dying(dying(ToldJob(2).training(), "w0"), "w1")
    told.exited("w1", 0)
    assert told.job.ending is None
    told.exited("w0", 0)
    code, reason = told.ending
    assert code == 0
    assert reason.startswith("All workers exited with code 0 before the elastic function had returned")
    assert told.logged(TrainingCutShort) == [TrainingCutShort()]
    assert told.logged(WorkerLost) == []


def test_when_one_ends_well_and_another_is_killed_the_state_is_lost() -> None:
    told = dying(dying(ToldJob(2).training(), "w0"), "w1")
    told.exited("w1", 0).exited("w0", -9)
    code, reason = told.ending
    assert code == 1
    assert "state of the job is lost" in reason


def test_a_newcomer_is_not_started_without_state_while_the_last_holder_is_dying() -> None:
    told = ToldJob(1, slots=2, max_np=2).training()
    told.feed(AskScale(2)).hello("w1").elastic("w1")
    dying(told, "w0")
    assert told.starts() == {}
    told.exited("w0", -9)
    assert "state of the job is lost" in told.ending[1]


def test_a_worker_whose_code_raised_is_not_replaced_before_the_others_are_well() -> None:
    told = ToldJob(2).training().says("w1", Failed("ValueError: x", "Traceback"))
    dying(told, "w1").exited("w1", 1)
    assert told.spawned() == {}
    told.ready(2, "w0")
    assert told.spawned() == {"w2": 1}


def test_when_all_raised_the_same_it_is_said_as_ever() -> None:
    told = ToldJob(2).training()
    for worker in ("w0", "w1"):
        told.says(worker, Failed("ValueError: x", "Traceback"))
        dying(told, worker)
    told.exited("w0", 1).exited("w1", 1)
    assert "raised the same exception: ValueError: x" in told.ending[1]


def test_where_a_lost_worker_costs_its_host_the_exit_is_awaited() -> None:
    told = ToldJob(2, on_failure="host").training()
    assert dying(told, "w1").told() == {}


def test_an_agent_that_is_lost_takes_its_dying_worker_along() -> None:
    told = ToldJob(2, slots=0)
    told.connect("a", 1).connect("b", 1).training()
    told.feed(AgentReported("b", WorkerDying("w1")))
    told.ready(2, "w0")
    assert told.members == ("w0",)
