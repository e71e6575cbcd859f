"""A slot whose workers fail again and again is in backoff for growing pauses."""

from __future__ import annotations

from typing import Any

from farandole.base.events.worker_events import SlotBackoff, WorkerSpawned
from farandole.job.coordinator.hosts import HEALTHY_S, backoff_s
from tests.support.told_job import ToldJob


def training_job(restarts: int = 10, **config: Any) -> ToldJob:
    told = ToldJob(2, restarts=restarts, **config).training()
    told.now_s += HEALTHY_S
    return told


def lose_newest(told: ToldJob) -> ToldJob:
    """The newest worker, which has not come as far as the elastic function, is killed."""
    return told.exited(max(told.job.workers, key=lambda name: int(name[1:])))


def test_the_pauses_grow_up_to_a_limit() -> None:
    assert [backoff_s(failures) for failures in (0, 1, 2, 3, 4, 7, 8, 100, 10_000)] == [0, 0, 1, 2, 4, 32, 60, 60, 60]


def test_a_healthy_worker_is_replaced_at_once_and_so_is_the_first_one_that_fails() -> None:
    told = training_job().exited("w1")
    assert told.spawned() == {"w2": 1}
    assert told.ready(2, "w0").exited("w2").spawned() == {"w3": 1}


def test_from_the_second_failure_in_a_row_on_the_slot_sits_out() -> None:
    told = lose_newest(training_job().exited("w1").ready(2, "w0").exited("w2"))
    assert told.spawned() == {}
    assert [event.line() for event in told.logged(SlotBackoff)] == [
        "slot 1 on host-a is in backoff for 1 s: 2 workers in a row failed there soon after their start"
    ]
    assert told.deadline_in_s == 1.0
    assert told.passes(0.9).spawned() == {}
    assert told.passes(0.1).spawned() == {"w4": 1}
    assert lose_newest(told).deadline_in_s == 2.0


def test_a_worker_that_trained_for_a_while_makes_up_for_all_before_it() -> None:
    told = lose_newest(training_job().exited("w1").ready(2, "w0").exited("w2")).passes(1.0)
    told.hello("w4").elastic("w4").ready(3, "w0").synced("w0", "w4")
    told.now_s += HEALTHY_S
    assert told.exited("w4").spawned() == {"w5": 1}
    assert told.ready(4, "w0").exited("w5").spawned() == {"w6": 1}


def test_frequent_kills_of_healthy_workers_is_not_slowed() -> None:
    told = training_job(restarts=100)
    for number in range(2, 50):
        told.exited(f"w{number - 1}")
        assert told.spawned() == {f"w{number}": 1}
        told.ready(told.job.number, "w0").hello(f"w{number}").elastic(f"w{number}").ready(told.job.number, "w0")
        told.now_s += HEALTHY_S


def test_the_kill_of_one_that_held_the_state_slows_nothing_however_soon_it_comes() -> None:
    told = training_job(restarts=100)
    for number in range(2, 20):
        told.exited(f"w{number - 1}")
        assert told.spawned() == {f"w{number}": 1}
        told.ready(told.job.number, "w0").hello(f"w{number}").elastic(f"w{number}").ready(told.job.number, "w0")
        told.synced("w0", f"w{number}")


def test_one_that_crashes_in_its_first_step_again_and_again_sits_out() -> None:
    told = training_job().exited("w1").ready(2, "w0")
    for worker, replaced in (("w2", {"w3": 1}), ("w3", {})):
        told.hello(worker).elastic(worker).ready(told.job.number, "w0").synced("w0", worker).exited(worker, -11)
        assert told.spawned() == replaced
        told.ready(told.job.number, "w0")
    assert told.deadline_in_s == 1.0


def test_a_slot_without_restarts_left_does_not_sit_out() -> None:
    told = lose_newest(training_job(restarts=2).exited("w1").ready(2, "w0").exited("w2"))
    assert told.logged(SlotBackoff) == []
    assert told.deadline_in_s is None


def test_a_job_whose_last_slot_sits_out_is_not_over() -> None:
    told = ToldJob(1, restarts=5).hello("w0").elastic("w0").exited("w0")
    assert told.spawned() == {"w1": 0}
    assert told.exited("w1").spawned() == {}
    assert told.job.ending is None
    assert told.passes(1.0).spawned() == {"w2": 0}


def test_the_pause_counts_before_the_first_generation_too() -> None:
    told = ToldJob(1, restarts=5).exited("w0")
    assert told.spawned() == {"w1": 0}
    assert told.exited("w1").spawned() == {}
    assert told.passes(1.0).spawned() == {"w2": 0}


def test_of_two_slots_in_backoff_the_one_whose_pause_ends_first_is_filled_first() -> None:
    told = ToldJob(3, restarts=10).training()
    told.now_s += HEALTHY_S
    told.exited("w1").exited("w2").ready(told.job.number, "w0")
    told.exited("w3").exited("w5")
    told.now_s += 0.25
    told.exited("w4").exited("w6")
    assert [event.slot for event in told.passes(told.deadline_in_s or 0).logged(WorkerSpawned)] == [1]
    assert told.deadline_in_s == 0.25
