"""Which checkpoints count, and who writes one when the job ends."""

from __future__ import annotations

from farandole.base.events.job_events import CheckpointFailed, CheckpointSaved, StateLost
from farandole.base.membership import Origin, Progress
from farandole.base.wire.link_messages import CheckpointEnded, MayPublish, PublishAnswer, Stop
from farandole.base.wire.messages import ForwardToWorkers
from farandole.job.coordinator.job import new_job
from farandole.job.coordinator.transition import StopRequested
from tests.support.told_job import ToldJob


def refusals(told: ToldJob) -> list[str]:
    said = [message.message for message in told.sent(ForwardToWorkers)]
    return [each.refusal for each in said if isinstance(each, PublishAnswer)]


def asks(told: ToldJob, worker: str, step: int) -> list[str]:
    return refusals(told.says(worker, MayPublish(f"step-{step}", Progress(1, step))))


def emergency_writers(told: ToldJob) -> list[str]:
    """Who is to save the state."""
    sent = told.sent(ForwardToWorkers)
    return [name for each in sent if isinstance(each.message, Stop) and each.message.saves for name in each.workers]


def saving(num_proc: int, **config: float) -> ToldJob:
    told = ToldJob(num_proc, slots=0, **config)
    told.job = new_job(told.config, "job", origin=Origin(1, 0))
    return told.connect("a", num_proc)


def test_a_member_may_publish_and_an_older_state_does_not_replace_a_newer_one() -> None:
    told = saving(2).training()
    assert asks(told, "w0", 10) == [""]
    assert asks(told, "w1", 10) == [""]
    assert asks(told, "w1", 9) == ["a newer checkpoint, of step 10, is already published"]
    assert asks(told, "w0", 11) == [""]


def test_who_was_lost_or_replaced_may_not() -> None:
    told = saving(2).training().exited("w0")
    assert asks(told, "w0", 10) == []
    told.ready(2, "w1")
    assert asks(told, "w1", 10) == [""]


def test_a_newcomer_may_not_before_it_is_a_member() -> None:
    told = saving(2).training().exited("w0").ready(2, "w1").synced("w1").hello("w2").elastic("w2")
    assert asks(told, "w2", 10) == ["this worker is not a member of the current generation"]


def test_a_member_that_has_not_confirmed_the_state_may_not() -> None:
    told = saving(2).hello("w0", "w1").elastic("w0", "w1")
    assert asks(told, "w0", 0) == ["this worker has not confirmed that it holds the state"]


def test_a_snapshot_of_the_generation_before_may_be_published_in_the_next_one() -> None:
    told = saving(3).training().exited("w2").ready(2, "w0", "w1").synced("w0", "w1")
    assert told.number == 2
    assert asks(told, "w0", 10) == [""]


def test_when_the_job_ends_the_first_survivor_that_holds_the_state_saves_it_and_is_still_answered() -> None:
    told = saving(3).training().exited("w0").feed(StopRequested(now=False, reason="SIGINT was received"))
    assert emergency_writers(told) == ["w1"]
    assert asks(told, "w1", 12) == [""]
    told.says("w1", CheckpointEnded("step-12", 12, 0.5))
    assert [event.step for event in told.logged(CheckpointSaved)] == [12]


def test_below_min_np_the_survivor_saves_the_state_when_the_job_gives_up() -> None:
    told = saving(2, min_np=2, restarts=0, elastic_timeout_s=5).training().exited("w1").ready(2, "w0").passes(6)
    assert told.ending[0] == 1
    assert emergency_writers(told) == ["w0"]


def test_who_raised_does_not_save_the_state() -> None:
    told = saving(2).training().raised("w0", "ValueError: no", exits=False)
    assert emergency_writers(told.feed(StopRequested(now=False, reason="SIGINT"))) == ["w1"]


def test_without_checkpoints_nobody_saves_anything() -> None:
    told = ToldJob(2).training()
    assert emergency_writers(told.feed(StopRequested(now=False, reason="SIGINT"))) == []


def test_a_failure_is_told_as_a_warning() -> None:
    told = saving(1).training().says("w0", CheckpointEnded("", 7, 0.1, "No space left on device (/data)"))
    (event,) = told.logged(CheckpointFailed)
    assert event.level == "warning"
    assert "No space left on device (/data); earlier checkpoints are untouched" in event.line()


def test_run_id_and_generations_go_on_from_where_earlier_jobs_were() -> None:
    told = ToldJob(2, slots=0)
    told.job = new_job(told.config, "job", origin=Origin(4, 17))
    told.connect("a", 2).hello("w0", "w1")
    start = told.starts()["w0"]
    assert (start.id.run_id, start.id.number, start.bootstrap) == (4, 18, True)


def test_a_file_of_the_scripts_own_is_nothing_to_go_on_from() -> None:
    told = saving(1).training().says("w0", MayPublish("x", Progress(1, 4), "best.pt"))
    assert "The state of the job is lost" in told.exited("w0").ending[1]


def lost_with_all_holders(has_checkpoint: bool) -> ToldJob:
    told = saving(2).training()
    if has_checkpoint:
        asks(told, "w0", 12)  # and who asked has no time to say how it went
    told.exited("w0").exited("w1")
    return told


def test_when_all_holders_are_lost_newcomers_go_on_from_the_newest_checkpoint_in_a_new_run_id() -> None:
    told = lost_with_all_holders(has_checkpoint=True)
    (event,) = told.logged(StateLost)
    assert (event.run_id, event.level) == (2, "warning")
    assert "w0 (slot 0) was killed by SIGKILL" in event.line()
    told.hello("w2", "w3").elastic("w2")
    start = told.starts()["w2"]
    assert (start.bootstrap, start.id.run_id) == (True, 2)
    assert start.id.number > 1


def test_in_the_new_run_id_a_checkpoint_of_the_old_one_never_counts_again() -> None:
    told = lost_with_all_holders(has_checkpoint=True).hello("w2", "w3").elastic("w2", "w3")
    told.synced(*told.members)
    said = told.says(told.members[0], MayPublish("late", Progress(2, 5)))
    assert refusals(said) == [""]
    said = told.says(told.members[0], MayPublish("late", Progress(1, 900)))
    assert refusals(said) == ["a newer checkpoint, of step 5, is already published"]


def test_a_state_that_is_lost_before_the_first_checkpoint_ends_the_job() -> None:
    told = lost_with_all_holders(has_checkpoint=False)
    assert told.ending[0] == 1
    assert "The state of the job is lost" in told.ending[1]


def test_a_job_that_began_from_a_checkpoint_has_one_to_go_on_from() -> None:
    told = ToldJob(1, slots=0)
    told.job = new_job(told.config, "job", origin=Origin(4, 17, has_checkpoint=True))
    told.connect("a", 1).training().exited("w0")
    assert [event.run_id for event in told.logged(StateLost)] == [5]


def test_code_that_raises_on_all_workers_is_not_started_again_from_a_checkpoint() -> None:
    told = saving(2).training()
    asks(told, "w0", 12)
    told.raised("w0", "ValueError: no").raised("w1", "ValueError: no")
    assert "All remaining workers raised the same" in told.ending[1]


def test_a_file_of_the_scripts_own_is_older_or_newer_than_others_of_its_path_only() -> None:
    told = saving(2).training()
    assert asks(told, "w0", 10) == [""]
    for step, file, refusal in (
        (5, "best.pt", ""),
        (4, "best.pt", "a newer checkpoint, of step 5, is already published"),
    ):
        assert refusals(told.says("w0", MayPublish(f"{step}", Progress(1, step), file))) == [refusal]
    assert refusals(told.says("w1", MayPublish("x", Progress(1, 4), "last.pt"))) == [""]
