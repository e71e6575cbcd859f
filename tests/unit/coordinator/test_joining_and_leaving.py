"""Planned changes: PREPARE, all READY at one boundary, START with the newcomers and without the leavers."""

from __future__ import annotations

import pytest

from farandole.base.events.job_events import ScaleRefused
from farandole.base.events.worker_events import WorkerEnded
from farandole.base.wire.control import AskScale
from farandole.base.wire.link_messages import Leaving
from farandole.base.wire.messages import Kill
from tests.support.told_job import ToldJob


def joined(told: ToldJob) -> ToldJob:
    """w1 was lost, w0 (and w2) go on in generation 2, and the replacement is about to ask for admission."""
    survivors = [worker for worker in told.members if worker != "w1"]
    told.exited("w1").ready(2, *survivors).synced(*survivors)
    return told.hello(f"w{len(survivors) + 1}")


def test_a_newcomer_is_admitted_at_a_boundary_behind_the_survivors() -> None:
    told = joined(ToldJob(3).training()).elastic("w3")
    assert told.told() == {"w0": ["Prepare"], "w2": ["Prepare"]}
    assert told.ready(3, "w2").starts() == {}
    assert told.ready(3, "w0").members == ("w0", "w2", "w3")


def test_nothing_is_planned_for_a_newcomer_that_has_only_called_init() -> None:
    assert joined(ToldJob(3).training()).told() == {"w3": ["Newcomer"]}


def test_nothing_is_planned_before_all_members_are_in_the_elastic_function() -> None:
    told = ToldJob(2).hello("w0", "w1").elastic("w0").says("w0", Leaving())
    assert told.told() == {}
    assert told.elastic("w1").told() == {"w0": ["Prepare"], "w1": ["Prepare"]}


def test_a_second_newcomer_is_taken_into_a_change_that_is_under_way() -> None:
    told = ToldJob(4).training().exited("w1").exited("w2").ready(3, "w0", "w3")
    told.hello("w4", "w5").elastic("w4").ready(4, "w0")
    assert told.elastic("w5").told() == {}
    assert told.ready(4, "w3").members == ("w0", "w3", "w4", "w5")


def test_a_newcomer_that_dies_leaves_nobody_waiting() -> None:
    told = joined(ToldJob(3).training()).elastic("w3").ready(3, "w0").exited("w3")
    assert told.told() == {}
    assert told.ready(3, "w2").members == ("w0", "w2")


def test_a_fault_overtakes_a_planned_change_and_takes_the_newcomer_in() -> None:
    told = joined(ToldJob(3).training()).elastic("w3").ready(3, "w0").exited("w2")
    assert told.told() == {"w0": ["Abort"]}
    assert told.ready(3, "w0").starts() == {}
    assert told.ready(4, "w0").members == ("w0", "w3")


def test_a_leaver_goes_when_all_are_ready_and_is_not_replaced() -> None:
    told = ToldJob(3).training().says("w1", Leaving())
    assert told.told() == {"w0": ["Prepare"], "w1": ["Prepare"], "w2": ["Prepare"]}
    told.ready(2, "w0", "w1")
    assert told.told() == {}
    told.ready(2, "w2")
    assert told.told() == {"w1": ["Left"]}
    assert told.members == ("w0", "w2")
    told.exited("w1", -15)
    assert (told.told(), told.spawned(), told.job.change) == ({}, {}, None)


def test_a_leaver_that_dies_before_it_may_go_is_lost_and_not_replaced() -> None:
    told = ToldJob(3).training().says("w1", Leaving()).exited("w1", -9)
    assert told.told() == {"w0": ["Abort"], "w2": ["Abort"]}
    assert told.spawned() == {}


def test_the_last_worker_that_leaves_ends_the_job() -> None:
    told = ToldJob(1).training().says("w0", Leaving()).ready(2, "w0")
    assert "Left" in told.told()["w0"]
    assert told.ending[0] == 1
    assert "last worker left" in told.ending[1]


def test_the_last_holder_leaves_only_after_it_has_handed_the_state_over() -> None:
    told = joined(ToldJob(2).training()).says("w0", Leaving())
    assert told.told() == {}
    assert told.elastic("w2").told() == {"w0": ["Prepare"]}
    assert told.ready(3, "w0").members == ("w0", "w2")
    assert told.synced("w2").told() == {"w0": ["Prepare"], "w2": ["Prepare"]}
    assert told.ready(4, "w0", "w2").members == ("w2",)


def test_leavers_go_even_if_too_few_stay() -> None:
    told = ToldJob(2, min_np=2, elastic_timeout_s=60).training().says("w1", Leaving()).ready(2, "w0", "w1")
    assert told.told() == {"w1": ["Left"]}
    assert "asked to leave are not replaced" in told.passes(60).ending[1]


def test_scaling_up_fills_free_slots_and_scaling_down_lets_the_newest_member_go() -> None:
    told = ToldJob(2, slots=4).training().feed(AskScale(3))
    assert told.spawned() == {"w2": 2}
    told.hello("w2").elastic("w2").ready(2, "w0", "w1").synced("w0", "w1", "w2")
    assert told.members == ("w0", "w1", "w2")
    assert told.feed(AskScale(2)).told() == {f"w{i}": ["Prepare"] for i in range(3)}
    assert told.ready(3, "w0", "w1", "w2").members == ("w0", "w1")


def test_scaling_down_stops_workers_that_are_no_members_first() -> None:
    told = ToldJob(2, slots=4).training().feed(AskScale(3)).feed(AskScale(2))
    assert [kill.worker for kill in told.sent(Kill)] == ["w2"]
    assert told.exited("w2", -15).spawned() == {}


@pytest.mark.parametrize("size", [1, 5])
def test_a_size_beyond_the_limits_is_refused(size: int) -> None:
    told = ToldJob(3, slots=8, min_np=2, max_np=4).training().feed(AskScale(size))
    (refused,) = told.logged(ScaleRefused)
    assert "at least 2 (--min-np) and at most 4 (--max-np)" in refused.line()
    assert told.job.target == 3


def test_the_exit_of_a_worker_that_was_let_go_is_no_loss_and_what_it_says_does_not_count() -> None:
    told = ToldJob(2, min_np=2, restarts=0).training().says("w1", Leaving()).ready(2, "w0", "w1")
    told.raised("w1", "KeyboardInterrupt", exits=False)
    assert told.actions == []
    told.exited("w1", 1)
    assert [event.line() for event in told.logged(WorkerEnded)] == ["w1 (slot 1) exited with code 1"]
    assert told.told() == {}


def test_a_holder_that_stays_to_hand_over_does_not_make_the_job_larger_than_max_np() -> None:
    told = joined(ToldJob(2, slots=3, max_np=2).training()).says("w0", Leaving()).feed(AskScale(2))
    assert told.spawned() == {"w3": 2}
    told.elastic("w2").hello("w3").elastic("w3").ready(3, "w0")
    assert told.members == ("w0", "w2")
