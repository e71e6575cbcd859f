"""What is done when nobody gets on any more."""

from __future__ import annotations

from dataclasses import replace

from farandole.base.events.generation_events import Recovered
from farandole.base.events.worker_events import CollectiveStalled, StallNoticed, WorkerLost, WorkersHung, WorkerStacks
from farandole.base.membership import Phase, WorkerStatus
from farandole.base.wire.link_messages import Stop
from farandole.base.wire.messages import ForwardToWorkers, Kill, WorkerDying, WorkerExited
from farandole.job.coordinator.hang_detection import HangDetector
from farandole.job.coordinator.transition import AgentReported, StepsStalled
from tests.support.told_job import ToldJob

TIMEOUT_S = 5.0


def training(workers: int = 3, **config: object) -> ToldJob:
    return ToldJob(workers, step_timeout_s=TIMEOUT_S, **config).training()


def stalled(told: ToldJob, hung: tuple[str, ...], waiting: tuple[str, ...], step: int = 7) -> ToldJob:
    return told.feed(StepsStalled(told.job.number, TIMEOUT_S, step, hung, waiting))


# Whether anybody gets on ----------------------------------------------------------------------------------


def seen(phases: str, count: int = 1) -> dict[str, WorkerStatus]:
    """U: in user code, W: waiting, R: regrouping, O: outside."""
    by_letter = {"U": Phase.USER, "W": Phase.WAITING, "R": Phase.REGROUPING, "O": Phase.OUTSIDE}
    return {f"w{index}": WorkerStatus(count, 1, 7, by_letter[letter]) for index, letter in enumerate(phases)}


def test_nothing_that_moves_for_the_time_is_a_stall() -> None:
    told, statuses = training(), HangDetector(TIMEOUT_S)
    statuses.record("a", seen("WUW"), 0.0)
    assert statuses.look(told.job, 0.0) is None
    statuses.record("a", seen("WUW"), 4.0)
    assert statuses.look(told.job, 4.9) is None
    found = statuses.look(told.job, 5.0)
    assert found == StepsStalled(told.number, 5.0, 7, ("w1",), ("w0", "w2"))


def test_a_stall_that_goes_on_is_told_again_after_the_same_time() -> None:
    told, statuses = training(), HangDetector(TIMEOUT_S)
    told_at = []
    for tenth in range(151):
        statuses.record("a", seen("WUW"), tenth / 10)
        if statuses.look(told.job, tenth / 10) is not None:
            told_at.append(tenth / 10)
    assert told_at == [5.0, 10.0, 15.0]


def test_without_a_step_timeout_a_stall_is_said_once_in_a_generation_and_nobody_is_stopped() -> None:
    told, statuses, found = ToldJob(3).training(), HangDetector(None), []
    for second in range(200):
        statuses.record("a", seen("WUW"), float(second))
        if (stalled := statuses.look(told.job, float(second))) is not None:
            found.append(second)
            told.feed(stalled)
    assert found == [60]
    (noticed,) = told.logged(StallNoticed)
    assert noticed.line().startswith("no step for 60 s after step 7: w1 in their own code, w0, w2 waiting")
    assert not told.sent(Kill)


def test_without_a_step_timeout_long_steps_of_all_are_no_stall() -> None:
    told, statuses = ToldJob(3).training(), HangDetector(None)
    for second in range(200):
        statuses.record("a", seen("UUU"), float(second))
        assert statuses.look(told.job, float(second)) is None


def test_a_worker_that_moves_is_no_stall() -> None:
    told, statuses = training(), HangDetector(TIMEOUT_S)
    for tenth in range(200):
        statuses.record("a", seen("WUW", count=tenth // 45), tenth / 10)  # slow, but alive
        assert statuses.look(told.job, tenth / 10) is None


def test_what_was_not_seen_lately_is_not_judged() -> None:
    told, statuses = training(), HangDetector(TIMEOUT_S)
    statuses.record("a", seen("WUW"), 0.0)
    assert all(statuses.look(told.job, tenth / 10) is None for tenth in range(200))


def test_a_member_that_cannot_be_seen_or_has_not_begun_is_not_judged() -> None:
    statuses = HangDetector(TIMEOUT_S)
    unseen, not_begun = training(), ToldJob(3, step_timeout_s=TIMEOUT_S).hello("w0", "w1", "w2").elastic("w0", "w1")
    for tenth in range(200):
        statuses.record("a", {name: each for name, each in seen("WUW").items() if name != "w2"}, tenth / 10)
        assert statuses.look(unseen.job, tenth / 10) is None
        statuses.record("a", seen("WWO"), tenth / 10)
        assert statuses.look(not_begun.job, tenth / 10) is None


def test_without_a_timeout_nothing_is_a_stall() -> None:
    told, statuses = training(), HangDetector(None)
    for tenth in range(200):
        statuses.record("a", seen("WUW"), tenth / 10)
        assert statuses.look(told.job, tenth / 10) is None


def test_a_change_of_the_membership_begins_the_time_anew() -> None:
    told, statuses = training(restarts=0), HangDetector(TIMEOUT_S)
    statuses.record("a", seen("WUW"), 0.0)
    statuses.look(told.job, 0.0)
    told.exited("w2", -9)
    statuses.record("a", seen("RU"), 4.0)
    assert statuses.look(told.job, 5.0) is None
    statuses.record("a", seen("RU"), 9.5)
    found = statuses.look(told.job, 10.0)
    assert found is not None
    assert (found.in_own_code, found.waiting) == (("w1",), ("w0",))


# What is done ---------------------------------------------------------------------------------------------


def test_those_for_whom_the_others_wait_are_killed_with_their_stacks() -> None:
    told = stalled(training(), ("w1",), ("w0", "w2"))
    (kill,) = told.sent(Kill)
    assert (kill.worker, kill.grace_s, kill.dumps_stacks) == ("w1", 0.0, True)
    assert [event.workers for event in told.logged(WorkersHung)] == [("w1",)]
    told.feed(AgentReported("a", WorkerExited("w1", -9, (), "Thread 1 ...")))
    assert [event.stacks for event in told.logged(WorkerStacks)] == ["Thread 1 ..."]
    (loss,) = told.logged(WorkerLost)
    assert loss.how.startswith(
        "was stopped because the other workers have waited for it for 5 s (--step-timeout 5), and was"
    )
    assert told.told() == {"w0": ["Abort"], "w2": ["Abort"]}


def test_one_that_was_hinted_to_be_dying_after_it_was_killed_is_lost_like_any_other() -> None:
    told = stalled(training(restarts=0), ("w1",), ("w0", "w2"))
    told.feed(AgentReported("a", WorkerDying("w1"))).ready(2, "w0", "w2").exited("w1", -9)
    assert len(told.logged(WorkerLost)) == 1
    told.stepped("w0", "w2")
    assert [event.lost[0][:15] for event in told.logged(Recovered)] == ["w1, which was s"]


def test_nobody_is_killed_twice() -> None:
    told = stalled(stalled(training(), ("w1",), ("w0", "w2")), ("w1",), ("w0", "w2"))
    assert told.sent(Kill) == []
    assert told.logged(WorkersHung) == []


def test_one_that_is_being_killed_does_not_finish() -> None:
    """Asked for its stacks it woke up, and came to its end."""
    told = stalled(training(2), ("w1",), ("w0",)).finished("w0", "w1")
    assert not told.job.is_released
    told.exited("w1", -9)
    assert told.told() == {"w0": ["Abort"]}


def test_a_hung_worker_that_holds_up_a_regroup_is_killed_too() -> None:
    told = training().exited("w2", -9).ready(2, "w0")
    stalled(told, ("w1",), ("w0",))
    assert [kill.worker for kill in told.sent(Kill)] == ["w1"]


def test_all_in_their_own_code_end_the_job_with_a_chance_to_save() -> None:
    told = training(2)
    told.job = replace(told.job, saves=True)
    stalled(told, ("w0", "w1"), ())
    code, reason = told.ending
    assert code == 1
    assert "w0 and w1 are in their own code" in reason
    assert "--step-timeout 5" in reason
    assert all(kill.dumps_stacks and kill.grace_s > 0 for kill in told.sent(Kill))
    stops = [each for each in told.sent(ForwardToWorkers) if isinstance(each.message, Stop)]
    assert any(isinstance(each.message, Stop) and each.message.saves for each in stops)


def test_stacks_are_told_also_while_the_job_ends() -> None:
    told = stalled(training(2), ("w0", "w1"), ())
    told.feed(AgentReported("a", WorkerExited("w0", -9, (), "Thread 1 ...")))
    assert len(told.logged(WorkerStacks)) == 1


def test_all_waiting_for_each_other_regroup_and_give_up_at_the_third_time() -> None:
    told, everybody = training(), ("w0", "w1", "w2")
    for number in (2, 3):
        stalled(told, (), everybody)
        assert len(told.logged(CollectiveStalled)) == 1
        assert told.told() == {worker: ["Abort"] for worker in everybody}
        told.ready(number, *everybody).synced(*everybody)
    stalled(told, (), everybody)
    assert "3 times at the same step" in told.ending[1]


def test_a_step_in_between_begins_the_count_anew() -> None:
    told, everybody = training(), ("w0", "w1", "w2")
    for number in (2, 3, 4, 5):
        stalled(told, (), everybody, step=number)
        told.ready(number, *everybody).synced(*everybody)
    assert told.job.ending is None


def test_survivors_that_wait_for_replacements_are_left_alone() -> None:
    told = training(2, min_np=2).exited("w1", -9).ready(2, "w0")
    before = told.job
    assert stalled(told, (), ("w0",)).job == before


def test_old_news_of_a_stall_changes_nothing() -> None:
    told = training().exited("w2", -9).ready(2, "w0", "w1")
    before = told.job
    told.feed(StepsStalled(1, TIMEOUT_S, 7, ("w1",), ("w0",)))
    assert told.job == before
    stalled(told, ("w2",), ("w0", "w1"))
    assert told.job == before
