"""Spares: workers that wait, ready, until a member is lost."""

from __future__ import annotations

from typing import Any

import pytest

from farandole.base.config import JobConfig
from farandole.base.events.worker_events import SparesMissing, SpareWaits
from farandole.base.wire.control import AskScale
from farandole.base.wire.link_messages import Leaving
from farandole.base.wire.messages import Kill
from farandole.errors import ConfigError
from farandole.job.coordinator.transition import AgentLost
from tests.support.told_job import ToldJob


def job_with_spares(size: int = 2, spares: int = 1, slots: int | None = None, **config: Any) -> ToldJob:
    """It trains, and its spares wait."""
    told = ToldJob(size, slots=slots or size + spares, spares=spares, **config).training()
    waiting = [worker for worker in told.job.workers if worker not in told.members]
    return told.hello(*waiting).elastic(*waiting)


def test_spares_are_started_once_the_script_turns_out_to_be_elastic() -> None:
    told = ToldJob(2, slots=4, spares=2).hello("w0", "w1")
    assert told.spawned() == {}
    assert told.elastic("w0").spawned() == {"w2": 2, "w3": 3}
    assert told.elastic("w1").spawned() == {}


def test_a_spare_that_is_ready_is_not_admitted_while_nobody_is_lost() -> None:
    told = ToldJob(2, slots=3, spares=1).training().hello("w2").elastic("w2")
    assert (told.told(), told.members) == ({}, ("w0", "w1"))
    assert [event.line() for event in told.logged(SpareWaits)] == ["w2 (slot 2) waits as a spare on host-a"]


def test_a_spare_takes_the_place_of_a_lost_member_in_the_very_regroup_that_removes_it() -> None:
    told = job_with_spares().exited("w0")
    assert told.told() == {"w1": ["Abort"]}
    assert told.spawned() == {"w3": 0}
    assert set(told.ready(2, "w1").starts()) == {"w1", "w2"}
    assert told.members == ("w1", "w2")


def test_the_worker_in_the_lost_one_s_slot_becomes_the_next_spare() -> None:
    told = job_with_spares().exited("w0").ready(2, "w1").synced("w1", "w2").hello("w3").elastic("w3")
    assert (told.told(), told.number) == ({}, 2)
    assert told.exited("w1").ready(3, "w2").members == ("w2", "w3")


def test_the_loss_of_a_spare_disturbs_nobody() -> None:
    told = job_with_spares().exited("w2")
    assert told.told() == {}
    assert told.spawned() == {"w3": 2}
    assert told.job.slots[told.job.workers["w3"].slot].restarts == 1


def test_two_members_are_replaced_by_two_spares_at_once() -> None:
    told = job_with_spares(3, spares=2).exited("w0").exited("w1").ready(3, "w2")
    assert told.members == ("w2", "w3", "w4")


def test_a_spare_that_dies_in_the_regroup_that_was_to_admit_it_is_left_out() -> None:
    told = job_with_spares(3).exited("w0").exited("w3").ready(2, "w1", "w2")
    assert told.members == ("w1", "w2")


def test_a_spare_that_dies_right_after_its_admission_costs_one_more_regroup() -> None:
    told = job_with_spares(3).exited("w0").ready(2, "w1", "w2")
    assert told.members == ("w1", "w2", "w3")
    told.exited("w3").ready(3, "w1", "w2")
    assert told.members == ("w1", "w2")


def test_the_spare_of_the_host_with_fewest_members_is_taken() -> None:
    told = ToldJob(3, slots=2, spares=3)
    told.connect("b", 2)
    told.connect("c", 2)
    told.training()
    waiting = ("w3", "w4", "w5")  # on b, c and c; members are on a, a and b
    told.hello(*waiting).elastic(*waiting).exited("w1").ready(2, "w0", "w2")
    assert told.members == ("w0", "w2", "w4")


def test_a_lost_host_costs_no_size_when_another_one_has_spares() -> None:
    told = ToldJob(4, slots=2, spares=2)
    told.connect("b", 2)
    told.connect("c", 2)
    told.training().hello("w4", "w5").elastic("w4", "w5").feed(AgentLost("b", "silent")).ready(2, "w0", "w1")
    assert told.members == ("w0", "w1", "w4", "w5")


def test_a_job_that_grows_takes_its_spare_and_starts_another_one() -> None:
    told = job_with_spares(slots=4).feed(AskScale(3))
    assert told.told() == {"w0": ["Prepare"], "w1": ["Prepare"]}
    assert told.spawned() == {"w3": 3}
    assert told.ready(2, "w0", "w1").members == ("w0", "w1", "w2")


def test_a_job_that_shrinks_lets_members_go_and_keeps_its_spare() -> None:
    told = job_with_spares(3).feed(AskScale(2))
    assert told.told() == {"w0": ["Prepare"], "w1": ["Prepare"], "w2": ["Prepare"]}
    told.ready(2, "w0", "w1", "w2")
    assert told.members == ("w0", "w1")
    assert told.exited("w2", 0).exited("w0").ready(3, "w1").members == ("w1", "w3")


def test_spares_are_told_when_the_training_is_over() -> None:
    told = job_with_spares().finished("w0", "w1")
    assert told.told() == {"w0": ["Released"], "w1": ["Released"], "w2": ["Left"]}
    assert told.sent(Kill) == []
    told.exited("w0", 0).exited("w1", 0)
    assert told.job.ending is None  # it may still say its last words
    assert told.exited("w2", 0).ending == (0, "2 workers finished the training.")


def test_a_spare_that_does_not_go_is_killed_after_its_grace() -> None:
    told = job_with_spares().finished("w0", "w1").exited("w0", 0).exited("w1", 0).passes(5.0)
    assert next(kill.worker for kill in told.sent(Kill)) == "w2"
    assert told.ending[0] == 0


def test_a_spare_that_is_asked_to_leave_costs_the_job_no_member() -> None:
    told = job_with_spares().says("w2", Leaving())
    assert told.told() == {"w2": ["Left"]}
    assert told.exited("w2", 0).spawned() == {}
    told.exited("w0").ready(2, "w1").hello("w3").elastic("w3")
    assert told.ready(3, "w1").members == ("w1", "w3")


def test_a_spare_takes_the_state_over_from_the_last_member_that_is_asked_to_leave() -> None:
    told = job_with_spares(1).says("w0", Leaving()).ready(2, "w0")
    assert told.members == ("w0", "w1")
    assert told.synced("w0", "w1").ready(3, "w0", "w1").members == ("w1",)


def test_a_job_below_its_size_takes_whoever_comes_first() -> None:
    told = ToldJob(2, slots=3, spares=1).training().exited("w0").ready(2, "w1")
    assert told.members == ("w1",)
    assert told.hello("w2").elastic("w2").ready(3, "w1").members == ("w1", "w2")


def test_missing_slots_are_warned_of_once() -> None:
    told = ToldJob(2, slots=3, spares=2).hello("w0", "w1").elastic("w0")
    line = "1 of 2 spares (--spares) cannot be started: the hosts have no more slots"
    assert [event.line() for event in told.logged(SparesMissing)] == [line]
    assert told.elastic("w1").passes(1.0).logged(SparesMissing) == []


def test_members_never_wait_for_a_spare() -> None:
    told = ToldJob(2, slots=3, spares=1, max_np=3, waits_for_newcomers=True).training()
    assert [worker.is_awaited for worker in told.job.workers.values()] == [False, False, False]
    assert told.told() == {}


@pytest.mark.parametrize(
    ("config", "words"), [({"spares": -1}, "must not be negative"), ({"spares": 1, "fills_slots": True}, "--max-np")]
)
def test_spares_that_cannot_be_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        JobConfig(2, **config)


def test_a_job_that_fills_slots_keeps_those_beyond_max_np_for_spares() -> None:
    told = ToldJob(2, slots=0, max_np=2, spares=1, fills_slots=True).offer(a=3)
    told.training().hello("w2").elastic("w2")
    assert told.members == ("w0", "w1")
    assert told.exited("w0").ready(2, "w1").members == ("w1", "w2")
