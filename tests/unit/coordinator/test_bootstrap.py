"""Until generation 1: slots are filled, all workers call init(), then they start together."""

from __future__ import annotations

import pytest

from farandole.base.events.worker_events import SlotsMissing, WorkerLost
from farandole.base.membership import DataAddress
from farandole.base.wire.control import AskScale
from farandole.base.wire.link_messages import Hello, Leaving, Synced
from farandole.base.wire.messages import AgentHello, FromWorker, Heartbeat, Kill, SpawnFailed, WorkerExited
from farandole.job.coordinator.transition import AgentLost, AgentReported
from tests.support.told_job import ToldJob


def test_one_worker_is_started_in_each_slot_when_the_agent_connects() -> None:
    assert ToldJob(3).spawned() == {"w0": 0, "w1": 1, "w2": 2}


def test_more_slots_than_workers_stay_empty() -> None:
    assert ToldJob(2, slots=8).spawned() == {"w0": 0, "w1": 1}


def test_workers_are_spread_over_agents_until_there_are_enough() -> None:
    told = ToldJob(3, slots=2)
    assert told.connect("b", 4).spawned() == {"w2": 0}


def test_generation_1_starts_when_the_last_worker_has_called_init() -> None:
    told = ToldJob(3).hello("w2", "w0")
    assert told.starts() == {}
    starts = told.hello("w1").starts()
    assert [starts[worker].placement.rank for worker in ("w0", "w1", "w2")] == [0, 1, 2]
    assert all(start.bootstrap and start.id.number == 1 for start in starts.values())
    assert (starts["w0"].previous.worker, starts["w0"].next.worker) == ("w2", "w1")
    assert starts["w0"].next.address.port == 20001


def test_a_job_of_one_worker_is_its_own_neighbour() -> None:
    start = ToldJob(1).hello("w0").starts()["w0"]
    assert start.previous == start.next
    assert start.next.worker == "w0"


def test_the_start_timeout_runs_from_the_first_init_and_names_who_is_missing() -> None:
    told = ToldJob(3, start_timeout_s=60)
    assert told.deadline_in_s is None
    told.hello("w1")
    assert told.deadline_in_s == 60
    code, reason = told.passes(60).ending
    assert code == 1
    assert "w0 (slot 0) and w2 (slot 2) did not call init()" in reason


def test_too_few_slots_end_the_job_after_the_start_timeout() -> None:
    told = ToldJob(3, slots=2, start_timeout_s=60)
    assert told.deadline_in_s == 60
    assert "offer only 2 slots for 3 workers" in told.passes(60).ending[1]


def test_people_are_told_once_for_how_many_slots_the_start_waits_and_how_long() -> None:
    told = ToldJob(3, slots=1, start_timeout_s=60)
    line = "waiting for 2 more slots (1 of 3 are available); the job ends in 60 s (--start-timeout)"
    assert [event.line() for event in told.logged(SlotsMissing)] == [line]
    assert told.passes(1).logged(SlotsMissing) == []
    assert told.connect("b", 1).logged(SlotsMissing) == []
    assert told.connect("c", 1).logged(SlotsMissing) == []


def test_a_job_that_is_scaled_beyond_its_slots_says_so_and_goes_on() -> None:
    told = ToldJob(2, max_np=4).training()
    assert told.logged(SlotsMissing) == []
    told.feed(AskScale(3))
    assert [event.line() for event in told.logged(SlotsMissing)] == ["waiting for 1 more slot (2 of 3 are available)"]
    assert told.feed(AskScale(3)).logged(SlotsMissing) == []
    assert told.job.ending is None


def test_slots_that_come_in_time_stop_that_clock() -> None:
    assert ToldJob(3, slots=2).connect("b", 1).deadline_in_s is None


def test_scripts_that_never_call_init_succeed_when_all_have_exited_with_0() -> None:
    told = ToldJob(2).exited("w0", 0)
    assert told.job.ending is None
    assert told.spawned() == {}
    end = told.exited("w1", 0).end
    assert end is not None
    assert end.exit_code == 0


@pytest.mark.parametrize("exit_comes_first", [True, False])
def test_a_worker_that_exits_without_init_while_another_waits_in_it_is_an_error(
    exit_comes_first: bool,
) -> None:
    told = ToldJob(2)
    told = told.exited("w1", 0).hello("w0") if exit_comes_first else told.hello("w0").exited("w1", 0)
    code, reason = told.ending
    assert code == 1
    assert "w0 waits in init(), but w1 exited with code 0 without calling it" in reason


@pytest.mark.parametrize("called_init", [True, False])
def test_a_start_that_fails_ends_the_job_with_that_exit_code(called_init: bool) -> None:
    told = ToldJob(2)
    if called_init:
        told.hello("w1")
    code, reason = told.exited("w1", 3).ending
    assert code == 3
    assert "w1 (slot 1) exited with code 3" in reason
    assert [kill.worker for kill in told.sent(Kill)] == ["w0"]


def test_a_worker_killed_before_generation_1_is_replaced_in_its_slot() -> None:
    told = ToldJob(2).hello("w0").exited("w1", -9)
    assert told.spawned() == {"w2": 1}
    assert set(told.hello("w2").starts()) == {"w0", "w2"}


def test_kills_before_generation_1_use_the_restart_budget() -> None:
    code, reason = ToldJob(2, restarts=1).exited("w1", -9).exited("w2", -9).ending
    assert code == 1
    assert "w2 (slot 1) was killed by SIGKILL (signal 9) before it called init()" in reason
    assert "--restarts 1" in reason


def test_a_worker_that_cannot_be_started_ends_the_job() -> None:
    told = ToldJob(1).feed(AgentReported("a", SpawnFailed("w0", "no such file: 'pyhton'")))
    assert told.ending[0] == 1
    assert "no such file: 'pyhton'" in told.ending[1]


def test_losing_the_only_agent_ends_the_job_at_once() -> None:
    told = ToldJob(2).feed(AgentLost("a", "silent for 3 s"))
    assert told.end is not None
    assert told.end.exit_code == 1
    assert "silent for 3 s" in told.end.reason


def test_a_worker_asked_to_leave_before_generation_1_goes_at_once_and_the_others_start() -> None:
    told = ToldJob(2).hello("w0").says("w0", Leaving())
    assert told.told() == {"w0": ["Left"]}
    assert set(told.hello("w1").starts()) == {"w1"}


def test_an_agent_that_is_known_already_and_beats_change_nothing() -> None:
    told = ToldJob(2)
    before = told.job
    told.connect("a", 99).feed(AgentReported("a", Heartbeat(7))).feed(AgentReported("a", AgentHello("a", "h", 2, 1)))
    assert (told.job, told.actions) == (before, [])


def test_a_worker_cannot_be_spoken_for_by_another_agent() -> None:
    told = ToldJob(1)
    told.connect("b", 1)
    before = told.job
    hello = Hello("w0", "", 1, 1, DataAddress("127.0.0.1", 1))
    assert told.feed(AgentReported("b", WorkerExited("w0", -9))).job == before
    assert told.feed(AgentReported("b", FromWorker("w0", hello))).job == before


def test_a_state_confirmed_for_another_generation_makes_no_holder() -> None:
    told = ToldJob(2).hello("w0", "w1")
    before = told.job
    assert told.says("w0", Synced(7)).says("w0", Synced(0)).job == before


@pytest.mark.parametrize(("exit_code", "left"), [(3, None), (-9, 3)])
def test_restarts_are_spoken_of_only_where_one_follows(exit_code: int, left: int | None) -> None:
    (lost,) = ToldJob(2).exited("w1", exit_code).logged(WorkerLost)
    assert lost.restarts_left == left
