"""With --max-restarts, a failure of a worker without an elastic function stops all workers and starts all again."""

from __future__ import annotations

import pytest

from farandole.base.config import JobConfig
from farandole.base.events.worker_events import AllWorkersRestart, WorkerFailed
from farandole.base.wire.link_messages import Elastic
from farandole.base.wire.messages import Kill, RecordedError, Spawn, SpawnFailed, WorkerExited
from farandole.errors import ConfigError
from farandole.job.coordinator.transition import AgentLost, AgentReported, StopRequested
from tests.support.told_job import ToldJob


def attempts(told: ToldJob) -> dict[str, int]:
    return {message.worker: message.attempt for message in told.sent(Spawn)}


def test_a_death_stops_the_others_and_starts_nobody_yet() -> None:
    told = ToldJob(3, max_restarts=3).exited("w1", -9)
    assert {kill.worker: kill.grace_s for kill in told.sent(Kill)} == {"w0": 5.0, "w2": 5.0}
    assert told.spawned() == {}
    [event] = told.logged(AllWorkersRestart)
    assert event.line() == ("restarting all 3 workers (attempt 2 of 4): w1 (slot 1) was killed by SIGKILL (signal 9)")


def test_when_all_are_gone_every_slot_gets_a_new_worker_of_the_next_attempt() -> None:
    told = ToldJob(3, max_restarts=1).exited("w1", 7).exited("w0", -15)
    assert told.spawned() == {}
    told.exited("w2", 1)
    assert told.spawned() == {"w3": 0, "w4": 1, "w5": 2}
    assert attempts(told) == {"w3": 1, "w4": 1, "w5": 1}
    assert [spawn.expected.rank for spawn in told.sent(Spawn) if spawn.expected] == [0, 1, 2]


def test_the_new_workers_begin_as_at_the_bootstrap_and_generations_are_counted_on() -> None:
    told = ToldJob(2, max_restarts=1).hello("w0", "w1").exited("w0", -9).exited("w1", -15).hello("w2", "w3")
    assert told.members == ("w2", "w3")
    assert told.number == 2
    assert all(start.bootstrap for start in told.starts().values())


def test_the_last_failure_ends_the_job_with_its_exit_code() -> None:
    told = ToldJob(2, max_restarts=1).exited("w0", 3).exited("w1", -15).exited("w3", 7)
    code, reason = told.ending
    assert code == 7
    assert "attempt 2 of 2 (--max-restarts)" in reason


def test_without_restarts_a_kill_before_init_ends_the_job_and_nobody_is_replaced() -> None:
    told = ToldJob(2, max_restarts=0).exited("w0", -9)
    assert told.ending[0] == 1
    assert "--max-restarts 0" in told.ending[1]
    assert told.spawned() == {}


def test_a_worker_that_is_done_already_is_started_again_with_the_others() -> None:
    told = ToldJob(3, max_restarts=1).exited("w0", 0).exited("w1", 1).exited("w2", -15)
    assert told.spawned() == {"w3": 0, "w4": 1, "w5": 2}


def test_a_second_failure_while_the_workers_are_stopped_is_the_same_restart() -> None:
    told = ToldJob(3, max_restarts=1).exited("w0", 1).exited("w1", 9)
    assert told.logged(AllWorkersRestart) == []
    assert told.exited("w2", -15).job.attempt == 1


def test_a_worker_of_the_last_attempt_that_enters_its_elastic_function_late_changes_nothing() -> None:
    told = ToldJob(2, max_restarts=1).hello("w0", "w1").exited("w0", -9).says("w1", Elastic())
    assert not told.job.is_elastic
    assert told.exited("w1", -9).spawned() == {"w2": 0, "w3": 1}


def test_once_a_worker_has_entered_its_elastic_function_nobody_else_is_stopped() -> None:
    told = ToldJob(3, max_restarts=1).training().exited("w1", -9)
    assert told.sent(Kill) == []
    assert told.spawned() == {"w3": 1}


def test_ctrl_c_in_the_middle_of_a_restart_ends_the_job() -> None:
    told = ToldJob(2, max_restarts=1).exited("w0", 1).feed(StopRequested(False, "Stopped by Ctrl-C."))
    assert told.ending[0] == 130
    assert told.exited("w1", -15).spawned() == {}
    assert told.end is not None


def test_the_hosts_of_the_next_attempt_may_be_others_but_it_begins_with_all_slots() -> None:
    told = ToldJob(2, slots=1, max_restarts=1, takes_agents=True).connect("b", 1)
    assert told.spawned() == {"w0": 0, "w1": 0}
    told.feed(AgentLost("b", "silent")).exited("w0", -15)
    assert told.spawned() == {}
    assert told.connect("c", 1).spawned() == {"w2": 0, "w3": 0}


def test_workers_of_a_lost_host_may_run_until_their_lease_is_over() -> None:
    told = ToldJob(2, slots=1, max_restarts=1, takes_agents=True).connect("b", 2)
    told.feed(AgentLost("b", "silent", lease_end_s=told.now_s + 3.0)).connect("c", 1).exited("w0", -15)
    assert told.spawned() == {}
    assert told.deadline_in_s == pytest.approx(3.0)
    assert told.passes(3.0).spawned() == {"w2": 0, "w3": 0}


def test_no_worker_starts_before_there_are_slots_for_all() -> None:
    told = ToldJob(3, slots=2, max_restarts=0, takes_agents=True)
    assert told.spawned() == {}
    told.connect("b", 1)
    assert [(spawn.expected.rank, spawn.expected.local_rank) for spawn in told.sent(Spawn) if spawn.expected] == [
        (0, 0),
        (1, 1),
        (2, 0),
    ]


def test_a_worker_that_cannot_be_started_at_all_is_not_tried_again() -> None:
    told = ToldJob(2, max_restarts=3).feed(AgentReported("a", SpawnFailed("w0", "no such file")))
    assert told.ending[0] == 1
    assert told.job.attempt == 0


def test_each_failure_is_told_in_detail_also_that_of_a_worker_which_is_being_stopped() -> None:
    error = RecordedError("ValueError: bad", "Traceback\nValueError: bad", 1700000000, "/logs/error.json")
    told = ToldJob(3, max_restarts=0).exited("w2", -9)
    [killed] = told.logged(WorkerFailed)
    assert (killed.rank, killed.exit_code, killed.was_stopped) == (2, -9, False)
    told.feed(AgentReported("a", WorkerExited("w0", 1, pid=77, error=error)))
    [recorded] = told.logged(WorkerFailed)
    assert (recorded.rank, recorded.pid, recorded.message, recorded.was_stopped) == (0, 77, "ValueError: bad", True)
    assert told.exited("w1", -15).logged(WorkerFailed) == []


def test_the_exception_of_a_worker_that_called_init_is_told_without_an_error_file() -> None:
    told = ToldJob(2, max_restarts=0).hello("w0", "w1").raised("w1", "ValueError: bad batch")
    assert [event.message for event in told.logged(WorkerFailed)] == ["ValueError: bad batch"]


def test_the_number_of_restarts_is_checked() -> None:
    with pytest.raises(ConfigError, match="--max-restarts must not be negative, got -1"):
        JobConfig(2, max_restarts=-1)
    with pytest.raises(ConfigError, match="--max-restarts 2 and --on-failure host contradict"):
        JobConfig(2, max_restarts=2, on_failure="host")


def filling(**config: object) -> ToldJob:
    """A job of at least two workers that fills its slots, at most four of them."""
    given = {"max_np": 4, "max_restarts": 1, "fills_slots": True, "takes_agents": True, **config}
    return ToldJob(2, slots=0, **given)


def test_enough_hosts_wait_for_further_ones_until_the_last_call_is_over() -> None:
    told = filling(last_call_s=5.0).connect("a", 2)
    assert told.spawned() == {}
    assert told.deadline_in_s == pytest.approx(5.0)
    told.passes(1.0).connect("b", 1)
    assert told.spawned() == {}
    assert len(told.passes(4.0).spawned()) == 3


def test_when_all_hosts_are_there_no_last_call_is_needed() -> None:
    told = filling(last_call_s=5.0).connect("a", 2).connect("b", 2)
    assert len(told.spawned()) == 4


def test_a_host_that_comes_later_restarts_all_workers_and_counts_as_no_failure() -> None:
    told = filling().connect("a", 2).connect("b", 1)
    [event] = told.logged(AllWorkersRestart)
    assert event.line() == "restarting all workers, 3 from now on: there are slots for 3 instead of 2"
    told.exited("w0", -15).exited("w1", -15)
    assert [spawn.expected.size for spawn in told.sent(Spawn) if spawn.expected] == [3, 3, 3]
    assert (told.job.attempt, told.job.failed_attempts) == (1, 0)


def test_a_host_that_is_lost_restarts_all_workers_with_the_slots_that_are_left() -> None:
    told = filling().connect("a", 2).connect("b", 1)
    told.exited("w0", -15).exited("w1", -15).feed(AgentLost("b", "silent")).exited("w2", -15).exited("w3", -15)
    assert [spawn.expected.size for spawn in told.sent(Spawn) if spawn.expected] == [2, 2]
    assert told.job.failed_attempts == 1


def test_a_host_that_comes_when_a_worker_is_done_already_changes_nothing() -> None:
    told = filling().connect("a", 2).exited("w0", 0).connect("b", 1)
    assert told.logged(AllWorkersRestart) == []
    assert told.spawned() == {}


def test_a_host_that_comes_to_an_elastic_job_restarts_nobody() -> None:
    told = filling().connect("a", 2).training().connect("b", 1)
    assert told.sent(Kill) == []
    assert told.spawned() == {"w2": 0}
