"""Scripts that never enter an elastic function: nothing is survived, and nothing is started again."""

from __future__ import annotations

from farandole.base.events.job_events import WorkerMetOthers, WorkersNeverMet, WorkerTrainsAlone
from farandole.base.wire.link_messages import LinkBroken
from farandole.base.wire.messages import Kill, Spawn, WorkerMet
from farandole.job.coordinator.transition import AgentReported
from tests.support.told_job import ToldJob


def test_a_death_ends_the_job_and_stops_the_others() -> None:
    told = ToldJob(3).hello("w0", "w1", "w2").exited("w1", -9)
    assert told.ending[0] == 1
    assert "w1 (slot 1) was killed by SIGKILL (signal 9)" in told.ending[1]
    assert {kill.worker for kill in told.sent(Kill)} == {"w0", "w2"}
    assert told.told() == {"w0": ["Stop"], "w2": ["Stop"]}
    assert told.spawned() == {}


def test_the_job_ends_with_the_worker_s_own_exit_code() -> None:
    assert ToldJob(2).hello("w0", "w1").exited("w1", 7).ending[0] == 7


def test_the_exception_is_named() -> None:
    told = ToldJob(2).hello("w0", "w1").raised("w1", "ValueError: bad batch")
    assert "having raised ValueError: bad batch" in told.ending[1]


def test_exit_code_0_waits_for_the_others_and_all_of_them_are_a_success() -> None:
    told = ToldJob(2).hello("w0", "w1").exited("w0", 0)
    assert told.job.ending is None
    assert told.spawned() == {}
    end = told.exited("w1", 0).end
    assert end is not None
    assert end.exit_code == 0


def test_a_short_script_also_runs_on_a_host_whose_agent_joins_later() -> None:
    """All ranks run, each once, even if the worker of the first host has ended by then."""
    told = ToldJob(2, slots=0, start_timeout_s=30.0).feed_hosts(x=1, y=1, may_change=False).connect("x", 1, "x")
    assert told.exited("w0", 0).job.ending is None
    assert told.deadline_in_s == 30.0
    assert told.connect("y", 1, "y").spawned() == {"w1": 0}
    assert [spawn.expected and spawn.expected.rank for spawn in told.sent(Spawn)] == [1]
    end = told.exited("w1", 0).end
    assert end is not None
    assert end.exit_code == 0


def test_a_death_after_another_s_exit_code_0_ends_the_job_with_1() -> None:
    assert ToldJob(2).hello("w0", "w1").exited("w0", 0).exited("w1", -11).ending[0] == 1


def test_reports_of_broken_links_are_left_to_the_workers_own_errors() -> None:
    told = ToldJob(2).hello("w0", "w1").says("w0", LinkBroken(1, "w1", "receive", "end of file"))
    assert told.deadline_in_s is None
    assert told.passes(10).job.ending is None


def test_an_exit_with_0_before_the_others_enter_the_elastic_function_is_a_loss_after_all() -> None:
    told = ToldJob(2).hello("w0", "w1").exited("w0", 0).elastic("w1")
    assert told.told() == {"w1": ["Abort"]}
    told.ready(2, "w1")
    assert told.members == ("w1",)
    assert told.spawned() == {"w2": 0}


def met(told: ToldJob, worker: str, has_met: bool) -> ToldJob:
    return told.feed(AgentReported("a", WorkerMet(worker, has_met)))


def ended(told: ToldJob) -> str:
    for worker in list(told.job.workers):
        told.exited(worker, 0)
    assert told.ending[0] == 0
    return told.ending[1]


def test_a_worker_that_trains_alone_is_reported_once_and_named_at_the_end() -> None:
    told = met(ToldJob(2), "w1", has_met=False)
    assert told.logged(WorkerTrainsAlone) == [WorkerTrainsAlone("w1", 2)]
    assert met(told, "w1", has_met=False).logged(WorkerTrainsAlone) == []
    assert ended(told) == (
        "All workers exited with code 0; none of them called init() or torch.distributed.init_process_group()."
    )


def test_that_is_withdrawn_when_the_worker_enters_a_process_group_or_calls_init() -> None:
    told = met(met(ToldJob(2), "w1", has_met=False), "w1", has_met=True)
    assert told.logged(WorkerMetOthers) == [WorkerMetOthers("w1")]
    assert ended(told) == "All workers exited with code 0."
    told = met(ToldJob(2), "w1", has_met=False).hello("w1")
    assert told.logged(WorkerMetOthers) == [WorkerMetOthers("w1")]
    assert met(told, "w1", has_met=False).logged(WorkerTrainsAlone) == []


def test_a_worker_that_ends_without_the_process_group_in_which_others_wait_is_reported_once() -> None:
    told = met(ToldJob(3), "w0", has_met=True).exited("w1", 0)
    assert told.logged(WorkersNeverMet) == [WorkersNeverMet(("w1",), ("w0",))]
    assert met(told, "w2", has_met=True).logged(WorkersNeverMet) == []
    assert told.exited("w2", 0).logged(WorkersNeverMet) == []  # it has met w0
    told = ToldJob(3).exited("w1", 0).exited("w2", 0)
    assert told.logged(WorkersNeverMet) == []
    assert met(told, "w0", has_met=True).logged(WorkersNeverMet) == [WorkersNeverMet(("w1", "w2"), ("w0",))]
    assert told.job.ending is None


def test_a_worker_that_met_the_others_at_once_is_no_news() -> None:
    told = met(ToldJob(2), "w1", has_met=True)
    assert told.actions == []
    assert ended(told) == "All workers exited with code 0."


def test_a_death_ends_a_job_whose_workers_are_in_a_process_group_of_torch() -> None:
    told = met(ToldJob(2), "w1", has_met=True).exited("w1", -9)
    assert told.ending[0] == 1
    assert (
        "The workers train in a process group of torch.distributed, which cannot continue without it" in told.ending[1]
    )
    assert met(ToldJob(2), "w1", has_met=True).exited("w1", 3).ending[0] == 3
    assert ToldJob(2).exited("w1", -9).job.ending is None, "before it has met others it is replaced"


def test_a_job_of_one_worker_and_old_news_change_nothing() -> None:
    assert met(ToldJob(1), "w0", has_met=False).actions == []
    assert met(ToldJob(2).exited("w1", 0), "w1", has_met=False).job.alone == ()
    assert ended(ToldJob(2)) == "All workers exited with code 0; none of them called init()."


def test_the_hosts_of_the_first_workers_are_groups_in_the_order_of_the_ranks() -> None:
    told = ToldJob(3, slots=0).connect("a", 2)
    groups = {each.worker: (each.group_rank, each.group_size) for each in told.sent(Spawn)}
    groups |= {each.worker: (each.group_rank, each.group_size) for each in told.connect("b", 2).sent(Spawn)}
    assert groups["w2"] == (1, 2)
    assert groups["w0"][0] == groups["w1"][0] == 0
    assert {each.attempt for each in told.sent(Spawn)} == {0}
