"""Which checkpoints count, and who writes one when the job ends."""

from __future__ import annotations

from farandole.coordinator import StopRequested, new_job
from farandole.events import CheckpointFailed, CheckpointSaved
from farandole.membership import Origin, Progress
from farandole.messages import CheckpointEnded, MayPublish, PublishAnswer, Stop, TellWorkers
from farandole.testing.told_job import ToldJob


def refusals(told: ToldJob) -> list[str]:
    said = [message.message for message in told.sent(TellWorkers)]
    return [each.refusal for each in said if isinstance(each, PublishAnswer)]


def asks(told: ToldJob, worker: str, step: int) -> list[str]:
    return refusals(told.says(worker, MayPublish(f"step-{step}", Progress(1, step))))


def keepers(told: ToldJob) -> list[str]:
    """Who is to save the state."""
    sent = told.sent(TellWorkers)
    return [name for each in sent if isinstance(each.message, Stop) and each.message.saves for name in each.workers]


def saving(num_proc: int, **config: float) -> ToldJob:
    told = ToldJob(num_proc, slots=0, **config)
    told.job = new_job(told.config, "job", origin=Origin(1, 0))
    return told.connect("a", num_proc)


def test_a_member_may_publish_and_an_older_state_does_not_replace_a_newer_one() -> None:
    told = saving(2).training()
    assert asks(told, "w0", 10) == [""]
    assert asks(told, "w1", 10) == [""]
    assert asks(told, "w1", 9) == ["a newer one, of step 10, is published already"]
    assert asks(told, "w0", 11) == [""]


def test_who_was_lost_or_replaced_may_not() -> None:
    told = saving(2).training().exited("w0")
    assert asks(told, "w0", 10) == []
    told.ready(2, "w1")
    assert asks(told, "w1", 10) == [""]


def test_a_newcomer_may_not_before_it_is_a_member() -> None:
    told = saving(2).training().exited("w0").ready(2, "w1").synced("w1").hello("w2").elastic("w2")
    assert asks(told, "w2", 10) == ["this worker is no member of the current generation"]


def test_a_member_that_has_not_confirmed_the_state_may_not() -> None:
    told = saving(2).hello("w0", "w1").elastic("w0", "w1")
    assert asks(told, "w0", 0) == ["this worker has not confirmed that it holds the state"]


def test_a_snapshot_of_the_generation_before_may_be_published_in_the_next_one() -> None:
    told = saving(3).training().exited("w2").ready(2, "w0", "w1").synced("w0", "w1")
    assert told.number == 2
    assert asks(told, "w0", 10) == [""]


def test_when_the_job_ends_the_first_survivor_that_holds_the_state_saves_it_and_is_still_answered() -> None:
    told = saving(3).training().exited("w0").feed(StopRequested(now=False, reason="SIGINT was received"))
    assert keepers(told) == ["w1"]
    assert asks(told, "w1", 12) == [""]
    told.says("w1", CheckpointEnded("step-12", 12, 0.5))
    assert [event.step for event in told.logged(CheckpointSaved)] == [12]


def test_below_min_np_the_survivor_saves_the_state_when_the_job_gives_up() -> None:
    told = saving(2, min_np=2, restarts=0, elastic_timeout_s=5).training().exited("w1").ready(2, "w0").passes(6)
    assert told.ending[0] == 1
    assert keepers(told) == ["w0"]


def test_who_raised_does_not_save_the_state() -> None:
    told = saving(2).training().raised("w0", "ValueError: no", exits=False)
    assert keepers(told.feed(StopRequested(now=False, reason="SIGINT"))) == ["w1"]


def test_without_checkpoints_nobody_saves_anything() -> None:
    told = ToldJob(2).training()
    assert keepers(told.feed(StopRequested(now=False, reason="SIGINT"))) == []


def test_a_failure_is_told_as_a_warning() -> None:
    told = saving(1).training().says("w0", CheckpointEnded("", 7, 0.1, "No space left on device (/data)"))
    (event,) = told.logged(CheckpointFailed)
    assert event.level == "warning"
    assert "No space left on device (/data); earlier checkpoints are untouched" in event.line()


def test_lineage_and_generations_go_on_from_where_earlier_jobs_were() -> None:
    told = ToldJob(2, slots=0)
    told.job = new_job(told.config, "job", origin=Origin(4, 17))
    told.connect("a", 2).hello("w0", "w1")
    start = told.starts()["w0"]
    assert (start.id.lineage, start.id.number, start.founding) == (4, 18, True)
