"""A job whose members leave their elastic function in the middle of the script trains on as a static job."""

from __future__ import annotations

from farandole.base.events.job_events import JobBecameStatic
from farandole.base.events.worker_events import AllWorkersRestart
from farandole.base.wire.control import AskScale, Declined
from farandole.base.wire.messages import Kill
from farandole.job.coordinator.control_requests import judge, status_of
from tests.support.told_job import ToldJob

REASON = "train.py:41: a second training loader"


def static(told: ToldJob, *workers: str) -> ToldJob:
    return told.finished(*workers, static_because=REASON)


def test_all_leave_together_and_one_line_says_why_and_what_is_lost() -> None:
    told = static(ToldJob(2).training(), "w0")
    assert told.told() == {}
    static(told, "w1")
    assert told.told() == {"w0": ["Released"], "w1": ["Released"]}
    [event] = told.logged(JobBecameStatic)
    assert event.line() == (
        "train.py:41: a second training loader; this job is static from here on, with 2 workers: when a worker is "
        "lost, the job ends, or starts again as a whole with --max-restarts"
    )
    told.exited("w0", 0)
    assert told.job.ending is None
    assert told.exited("w1", 0).ending == (0, "All workers exited with code 0.")


def test_a_loss_ends_the_job_and_the_reason_is_said_again() -> None:
    told = static(ToldJob(3).training(), "w0", "w1", "w2").exited("w1", -9)
    code, why = told.ending
    assert code == 1
    assert why.endswith(f"The job had become static, so the others cannot continue without it: {REASON}.")
    assert told.spawned() == {}


def test_with_max_restarts_a_loss_restarts_the_whole_job_which_may_become_elastic_again() -> None:
    told = static(ToldJob(2, max_restarts=1).training(), "w0", "w1").exited("w0", -9)
    assert told.logged(AllWorkersRestart)
    told.exited("w1", -15)
    assert told.spawned() == {"w2": 0, "w3": 1}
    told.hello("w2", "w3")
    assert all(start.bootstrap for start in told.starts().values())
    told.elastic("w2", "w3").synced("w2", "w3").exited("w2", -9)
    assert told.told() == {"w3": ["Abort"]}


def test_a_restart_starts_as_many_workers_as_the_job_had_at_first() -> None:
    told = ToldJob(3, max_restarts=1, restarts=0).training().exited("w1", -9).ready(2, "w0", "w2")
    static(told.synced("w0", "w2"), "w0", "w2").exited("w0", -9).exited("w2", -15)
    assert told.spawned() == {"w3": 0, "w4": 1, "w5": 2}


def test_a_newcomer_that_has_not_joined_ends_and_no_further_one_is_started() -> None:
    told = ToldJob(3).training().exited("w1", -9)
    assert told.spawned() == {"w3": 1}
    told.ready(2, "w0", "w2").synced("w0", "w2").hello("w3")
    static(told, "w0", "w2")
    assert [kill.reason for kill in told.sent(Kill)] == ["the job is static from now on"]
    told.exited("w3", -15)
    assert told.spawned() == {}
    assert told.job.ending is None


def test_a_newcomer_that_waits_to_be_admitted_is_told_to_leave() -> None:
    told = ToldJob(3).training().exited("w1", -9).ready(2, "w0", "w2").synced("w0", "w2").hello("w3")
    static(told, "w0").elastic("w3")
    assert static(told, "w2").told() == {"w0": ["Released"], "w2": ["Released"], "w3": ["Left"]}


def test_a_loss_before_all_have_left_is_survived() -> None:
    told = static(ToldJob(3).training(), "w0", "w1").exited("w2", -9)
    assert told.told() == {"w0": ["Abort"], "w1": ["Abort"]}
    static(told.ready(2, "w0", "w1").synced("w0", "w1"), "w0", "w1")
    assert told.logged(JobBecameStatic)[0].workers == ("w0", "w1")
    assert told.spawned() == {}


def test_its_size_is_fixed_from_then_on_and_its_workers_train() -> None:
    told = static(ToldJob(2).training(), "w0", "w1")
    assert {worker.state for worker in status_of(told.job, told.now_s).members} == {"trains"}
    declined = judge(told.job, AskScale(1))
    assert isinstance(declined, Declined)
    assert REASON in declined.reason
