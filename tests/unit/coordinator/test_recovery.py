"""One report for each regroup, once all of its members have applied a step."""

from __future__ import annotations

from dataclasses import replace

from farandole.base.events.generation_events import Recovered
from farandole.base.membership import Origin
from farandole.base.wire.messages import WorkerDying, WorkerExited
from farandole.job.coordinator.transition import AgentLost, AgentReported, StepsSeen
from tests.support.told_job import ToldJob


def test_a_loss_is_reported_when_all_survivors_have_applied_a_step() -> None:
    told = ToldJob(3, restarts=0).training().exited("w1", -9)
    told.passes(0.005).ready(2, "w0", "w2").synced("w0", "w2")
    assert told.stepped("w0", connected_s=0.001).logged(Recovered) == []
    told.stepped("w2", connected_s=0.002, synced_s=0.003, stepped_s=0.004, steps_redone=1, samples_redone=12)
    (report,) = told.logged(Recovered)
    assert (report.ready_ms, report.connected_ms, report.synced_ms, report.first_step_ms) == (5, 2, 3, 4)
    assert (report.total_ms, report.slowest) == (14, "w2")
    assert (report.steps_redone, report.samples_redone) == (1, 12)
    assert report.lost == ("w1, which was killed by SIGKILL (signal 9)",)
    assert report.line() == (
        "recovered in 14 ms from the loss of w1, which was killed by SIGKILL (signal 9): noticed by its exit, "
        "ready 5, connected 2, synced 3, first step 4; 1 step redone; slowest w2"
    )


def test_under_the_commit_rule_the_report_says_to_which_commit_all_went_back() -> None:
    told = ToldJob(3, restarts=0).training().exited("w1", -9).ready(2, "w0", "w2")
    told.stepped("w0", counts="commit", began_at=5, steps_redone=20)
    told.stepped("w2", counts="commit", began_at=5, steps_redone=19)
    (report,) = told.logged(Recovered)
    assert (report.counts, report.began_at, report.steps_redone, report.lost_at) == ("commit", 5, 20, None)
    assert "; went back 20 steps to commit 5; slowest" in report.line()
    nothing = replace(report, began_at=0)
    assert "; went back 20 steps to the beginning, since nothing was committed; slowest" in nothing.line()
    assert "back" not in replace(report, steps_redone=0).line()


def test_a_job_that_goes_on_from_a_checkpoint_says_how_far_it_went_back() -> None:
    told = ToldJob(2, min_np=2, restarts=2, origin=Origin(2, 10, has_checkpoint=True)).training()
    told.feed(StepsSeen(120)).feed(StepsSeen(118)).exited("w0").exited("w1")
    told.hello("w2", "w3").elastic("w2", "w3")
    assert all(start.bootstrap for start in told.starts().values())
    told.synced("w2", "w3").stepped("w2", began_at=100)
    (report,) = told.stepped("w3", began_at=100).logged(Recovered)
    assert (report.lost_at, report.began_at) == (120, 100)
    assert "; went back from step 120 or later to the checkpoint at step 100; slowest" in report.line()
    assert "; went back to the checkpoint at step 100; slowest" in replace(report, lost_at=90).line()
    told.exited("w3").hello("w4").elastic("w4").ready(told.job.number, "w2")
    (report,) = told.stepped("w2", began_at=101).stepped("w4", began_at=101).logged(Recovered)
    assert report.lost_at is None


def test_it_is_told_once() -> None:
    told = ToldJob(2, restarts=0).training().exited("w1", -9).ready(2, "w0").stepped("w0")
    assert len(told.logged(Recovered)) == 1
    assert told.stepped("w0").logged(Recovered) == []


def test_the_exit_of_a_dying_worker_is_awaited_and_its_last_words_are_in_the_report() -> None:
    told = ToldJob(2, restarts=0).training().feed(AgentReported("a", WorkerDying("w1")))
    assert told.ready(2, "w0").stepped("w0").logged(Recovered) == []
    told.feed(AgentReported("a", WorkerExited("w1", 3, ("what a pity",))))
    (report,) = told.logged(Recovered)
    assert report.lost == ("w1, which exited with code 3",)
    assert report.noticed == ("the end of its main thread",)
    assert report.last_lines == ("what a pity",)


def test_two_faults_before_the_first_step_are_one_recovery() -> None:
    told = ToldJob(3, restarts=0).training().exited("w1", -9)
    told.passes(0.010).ready(2, "w0", "w2").stepped("w0")
    told.passes(0.010).exited("w2", -11).passes(0.010).ready(3, "w0").stepped("w0", stepped_s=0.001)
    (report,) = told.logged(Recovered)
    assert [lost[:2] for lost in report.lost] == ["w1", "w2"]
    assert report.total_ms == 31


def test_the_silence_of_a_host_counts() -> None:
    told = ToldJob(2, slots=0)
    told.connect("a", 1).connect("b", 1).training()
    told.feed(AgentLost("b", "nothing was received from it", silent_s=3.0))
    told.ready(2, "w0").stepped("w0")
    (report,) = told.logged(Recovered)
    assert (report.silent_ms, report.total_ms) == (3000, 3000)
    assert report.noticed == ("the silence of agent b",)


def test_silence_that_is_noticed_during_the_recovery_counts_only_until_it_began() -> None:
    """A broken connection begins it after 1.0 s of silence; the loss is noticed after 3.0 s."""
    told = ToldJob(3, slots=0)
    told.connect("a", 1).connect("b", 1).connect("c", 1).training()
    told.link_broken("w0", "w2").passes(0.5)
    assert told.job.change is not None
    told.now_s += 2.0
    told.feed(AgentLost("c", "nothing was received from it", silent_s=3.0))
    told.ready(3, "w0", "w1").stepped("w0", "w1")
    (report,) = told.logged(Recovered)
    assert (report.silent_ms, report.ready_ms, report.total_ms) == (1000, 2000, 3000)


def test_a_newcomer_is_reported_as_a_change() -> None:
    told = ToldJob(2, restarts=1).training().exited("w1", -9).ready(2, "w0").stepped("w0")
    told.hello("w2").elastic("w2").ready(3, "w0")
    assert told.members == ("w0", "w2")
    assert told.stepped("w0").logged(Recovered) == []
    (report,) = told.stepped("w2", synced_s=0.02).logged(Recovered)
    assert report.is_planned
    assert report.line().startswith("changed in 20 ms (w2 joins): ready 0, ")


def test_old_news_of_a_first_step_do_not_count() -> None:
    told = ToldJob(3, restarts=0).training().exited("w1", -9).ready(2, "w0", "w2").stepped("w0")
    told.exited("w2", -9).ready(3, "w0")
    assert told.job.recovery is not None
    assert told.job.recovery.step is None


def test_members_that_have_finished_need_no_further_step() -> None:
    told = ToldJob(3, restarts=0).training().exited("w1", -9).ready(2, "w0", "w2")
    told.stepped("w0").finished("w2")
    assert [report.slowest for report in told.logged(Recovered)] == ["w0"]


def test_an_exit_that_is_known_only_after_the_end_of_the_training_is_in_a_report_too() -> None:
    told = ToldJob(2, restarts=0).training().feed(AgentReported("a", WorkerDying("w1")))
    told.ready(2, "w0").stepped("w0").finished("w0")
    assert told.job.is_released
    (report,) = told.exited("w1", -9).logged(Recovered)
    assert report.lost == ("w1, which was killed by SIGKILL (signal 9)",)


def test_the_first_generation_is_no_recovery() -> None:
    told = ToldJob(2).training()
    assert told.stepped("w0", "w1").logged(Recovered) == []
