"""An elastic job loses a member: ABORT, READY, START, and a replacement in the same slot."""

from __future__ import annotations

import pytest

from farandole.base.events.generation_events import GenerationStarted
from farandole.base.events.worker_events import WorkerLost
from farandole.base.wire.link_messages import Abort
from farandole.base.wire.messages import ForwardToWorkers, Kill
from farandole.job.coordinator.transition import AgentLost
from tests.support.told_job import ToldJob


def test_survivors_are_told_to_abort_and_the_slot_is_filled_at_once() -> None:
    told = ToldJob(3).training().exited("w1", -9)
    assert told.told() == {"w0": ["Abort"], "w2": ["Abort"]}
    (message,) = told.sent(ForwardToWorkers)
    assert message.message == Abort(2, "w1 (slot 1) was killed by SIGKILL (signal 9)")
    assert told.spawned() == {"w3": 1}
    (lost,) = told.logged(WorkerLost)
    assert lost.line() == "lost w1 (slot 1): it was killed by SIGKILL (signal 9); 3 restarts left for its slot"


def test_the_next_generation_starts_when_all_survivors_are_ready() -> None:
    told = ToldJob(3).training().exited("w1")
    assert told.ready(2, "w2").starts() == {}
    told.now_s += 0.02
    starts = told.ready(2, "w0").starts()
    assert {worker: start.placement.rank for worker, start in starts.items()} == {"w0": 0, "w2": 1}
    assert not any(start.bootstrap for start in starts.values())
    (started,) = told.logged(GenerationStarted)
    assert started.line() == "generation 2 starts after 20 ms with 2 workers: w0, w2"


@pytest.mark.parametrize("exit_code", [0, 1, -9, -15])
def test_any_exit_of_an_unfinished_member_is_a_loss(exit_code: int) -> None:
    assert ToldJob(2).training().exited("w0", exit_code).told() == {"w1": ["Abort"]}


def test_a_second_death_while_regrouping_replaces_the_number_and_all_answer_again() -> None:
    told = ToldJob(3).training().exited("w1").ready(2, "w0").exited("w2")
    assert told.told() == {"w0": ["Abort"]}
    assert told.ready(2, "w0").starts() == {}
    assert told.ready(3, "w0").number == 3


def test_old_news_about_a_replaced_worker_changes_nothing() -> None:
    told = ToldJob(2).training().exited("w1").ready(2, "w0")
    before = told.job
    told.exited("w1").elastic("w1").ready(2, "w1").link_broken("w1", "w0")
    assert (told.job, told.actions) == (before, [])


def test_members_of_the_bootstrap_that_are_not_in_the_elastic_function_yet_must_be_ready_too() -> None:
    told = ToldJob(3).hello("w0", "w1", "w2").elastic("w0").exited("w1")
    assert told.told() == {"w0": ["Abort"], "w2": ["Abort"]}
    assert told.ready(2, "w0").starts() == {}
    assert set(told.elastic("w2").ready(2, "w2").starts()) == {"w0", "w2"}


def test_a_generation_without_any_confirmed_state_is_a_bootstrap_again() -> None:
    told = ToldJob(2).hello("w0", "w1").elastic("w0", "w1").exited("w1")
    assert told.ready(2, "w0").starts()["w0"].bootstrap


def test_losing_every_holder_ends_the_job_rather_than_starting_at_step_0() -> None:
    told = ToldJob(2).hello("w0", "w1").elastic("w0", "w1").synced("w0").exited("w0").ready(2, "w1")
    assert told.ending[0] == 1
    assert "The state of the job is lost" in told.ending[1]
    assert "w0 (slot 0) was killed by SIGKILL" in told.ending[1]
    assert told.ending[1].endswith("no checkpoint to continue from: --checkpoint DIR writes them.")


def test_a_confirmation_that_is_under_way_when_the_first_one_to_confirm_dies_counts() -> None:
    """On a busy machine a worker may have begun its first step before the others' messages arrive."""
    told = ToldJob(2).hello("w0", "w1").elastic("w0", "w1").synced("w0").exited("w0")
    assert told.told() == {"w1": ["Abort"]}
    start = told.synced("w1").ready(2, "w1").starts()["w1"]
    assert not start.bootstrap


def test_a_member_that_did_not_confirm_the_new_generation_still_holds_the_old_state() -> None:
    told = ToldJob(3).training().exited("w2").ready(2, "w0", "w1").synced("w0").exited("w0").ready(3, "w1")
    assert told.members == ("w1",)


def test_an_agent_takes_all_its_workers_along_in_one_regroup() -> None:
    told = ToldJob(4, slots=2)
    told.connect("b", 4)
    told.training().feed(AgentLost("a", "silent"))
    assert told.told() == {"w2": ["Abort"], "w3": ["Abort"]}
    assert told.job.number == 2
    assert told.spawned() == {"w4": 2, "w5": 3}


def test_a_lost_agent_that_comes_back_gets_workers_again() -> None:
    told = ToldJob(2, slots=1)
    told.connect("b", 1)
    told.training().feed(AgentLost("b", "silent"))
    assert told.spawned() == {}
    assert told.connect("b", 1).spawned() == {"w2": 0}


# The restart budget, and too few workers -------------------------------------------------------------------


def test_a_slot_is_filled_only_within_its_budget() -> None:
    told = ToldJob(2, restarts=1).training().exited("w1")
    assert told.spawned() == {"w2": 1}
    assert told.exited("w2").spawned() == {}


def test_below_min_np_ready_members_wait_and_the_newcomer_makes_the_job_go_on() -> None:
    told = ToldJob(2, min_np=2, elastic_timeout_s=60).training().exited("w1").ready(2, "w0")
    assert told.starts() == {}
    assert told.deadline_in_s == 60
    assert told.hello("w2").told() == {"w2": ["Newcomer"]}
    assert set(told.elastic("w2").starts()) == {"w0", "w2"}
    assert told.deadline_in_s is None


def test_the_elastic_timeout_says_how_many_are_needed_and_why_they_did_not_come() -> None:
    told = ToldJob(2, min_np=2, restarts=0, elastic_timeout_s=60).training().exited("w1").ready(2, "w0")
    code, reason = told.passes(60).ending
    assert code == 1
    assert "needs 2 workers (--min-np) and had 1 for 60 s (--elastic-timeout 60)" in reason
    assert "the restart budget of slot 1 is used up (--restarts 0)" in reason


def test_the_wait_for_workers_is_not_prolonged_by_another_death() -> None:
    told = ToldJob(3, min_np=3, restarts=0, elastic_timeout_s=60).training().exited("w1").passes(40)
    assert told.exited("w2").deadline_in_s == 20


def test_a_job_without_anybody_left_to_start_ends_at_once() -> None:
    told = ToldJob(1, restarts=0).hello("w0").elastic("w0").exited("w0")
    assert "No worker is left" in told.ending[1]


# Exceptions in user code -----------------------------------------------------------------------------------


def test_the_slot_of_a_worker_that_raised_is_filled_once_the_others_prove_to_go_on() -> None:
    told = ToldJob(2).training().raised("w1", "ValueError: bad file")
    assert told.spawned() == {}
    assert told.told() == {"w0": ["Abort"]}
    assert told.ready(2, "w0").spawned() == {"w2": 1}


def test_it_is_filled_too_when_the_others_cannot_go_on_without_it() -> None:
    told = ToldJob(2, min_np=2).training().raised("w1", "ValueError: bad file").ready(2, "w0")
    assert told.spawned() == {"w2": 1}


def test_the_same_exception_on_all_workers_ends_the_job_and_is_named_once() -> None:
    told = ToldJob(2).training().raised("w0", "ValueError: on every rank").raised("w1", "ValueError: on every rank")
    code, reason = told.ending
    assert code == 1
    assert reason.count("ValueError: on every rank") == 1
    assert told.job.spawned == 2


def test_a_worker_that_raised_and_does_not_end_is_killed() -> None:
    told = ToldJob(2, grace_s=5).training().raised("w1", "ValueError: stuck", exits=False)
    assert told.deadline_in_s == 5
    told.passes(5)
    assert [(kill.worker, kill.grace_s) for kill in told.sent(Kill)] == [("w1", 0.0)]
    assert told.deadline_in_s is None
