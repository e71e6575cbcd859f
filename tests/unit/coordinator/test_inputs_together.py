"""Inputs that arrive together are decided together: one conclusion from all of them."""

from __future__ import annotations

import copy

import pytest

from farandole.base.events.generation_events import RegroupBegan
from farandole.base.events.worker_events import WorkerLost, WorkerSpawned
from farandole.base.wire.control import AskScale
from farandole.base.wire.link_messages import Failed, Ready
from farandole.base.wire.messages import FromWorker, WorkerDying, WorkerExited
from farandole.job.coordinator.decide import decide
from farandole.job.coordinator.decision_loop import rest_s
from farandole.job.coordinator.sentences import listed
from farandole.job.coordinator.transition import AgentConnected, AgentReported
from tests.support.told_job import ToldJob


def test_many_losses_are_one_regroup() -> None:
    told = ToldJob(5).training()
    told.feed(*(AgentReported("a", WorkerExited(name, -9)) for name in ("w1", "w3", "w4")))
    assert told.told() == {"w0": ["Abort"], "w2": ["Abort"]}
    (began,) = told.logged(RegroupBegan)
    assert began.number == 2
    assert [f"{name} " in began.reason for name in ("w1", "w3", "w4")] == [True] * 3
    assert len(told.logged(WorkerLost)) == 3


def test_the_loss_of_a_large_part_of_a_job_is_told_in_a_few_words() -> None:
    told = ToldJob(400).training()
    told.feed(*(AgentReported("a", WorkerExited(f"w{index}", -9)) for index in range(300)))
    (began,) = told.logged(RegroupBegan)
    assert began.reason.endswith("; and 284 more")
    assert len(began.survivors) == 100
    assert began.line().startswith("regrouping for generation 2 with w300, w301, ")
    assert "w307 and 92 others: w0 (slot 0) was killed" in began.line()
    assert listed(f"w{index}" for index in range(20)) == "w0, w1, w2, w3, w4, w5, w6, w7 and 12 others"
    assert listed(["w0", "w1", "w2"]) == "w0, w1 and w2"


def test_the_last_answer_and_the_next_loss_are_one_decision() -> None:
    told = ToldJob(4).training().exited("w3").ready(2, "w0")
    ready = [AgentReported("a", FromWorker(name, Ready(2))) for name in ("w1", "w2")]
    told.feed(*ready, AgentReported("a", WorkerExited("w2", -9)))
    assert told.starts() == {}
    assert told.told() == {"w0": ["Abort"], "w1": ["Abort"]}
    assert told.ready(3, "w0", "w1").members == ("w0", "w1")


def test_the_agents_of_many_hosts_join_in_one_decision() -> None:
    told = ToldJob(6, slots=0)
    told.feed(*(AgentConnected(name, name, 2) for name in "abc"))
    assert [event.rank for event in told.logged(WorkerSpawned)] == [0, 1, 2, 3, 4, 5]
    assert [event.host for event in told.logged(WorkerSpawned)] == ["a", "a", "b", "b", "c", "c"]


def test_a_worker_that_raised_is_dying_and_is_gone_within_one_decision() -> None:
    told = ToldJob(3).training()
    failed = FromWorker("w1", Failed("ValueError: x", "Traceback\nValueError: x"))
    told.feed(*(AgentReported("a", each) for each in (failed, WorkerDying("w1"), WorkerExited("w1", 1))))
    (lost,) = told.logged(WorkerLost)
    assert lost.how == "exited with code 1"
    assert told.told() == {"w0": ["Abort"], "w2": ["Abort"]}


def test_a_decision_does_not_change_the_job_that_it_was_given() -> None:
    told = ToldJob(4, min_np=1, max_np=6, slots=6).training()
    inputs = [
        AskScale(3),
        AgentReported("a", WorkerExited("w1", -9)),
        AgentConnected("b", "b", 2),
        AskScale(6),
    ]
    before = copy.deepcopy(told.job)
    after, actions = decide(told.job, inputs, told.now_s)
    assert told.job == before
    assert (after.workers.keys(), after.slots.keys()) != (before.workers.keys(), before.slots.keys())
    assert decide(told.job, inputs, told.now_s) == (after, actions)


def test_a_leaving_worker_with_the_newest_state_stays_until_another_one_has_it() -> None:
    """The last sync of w0 was in generation 1: it may lack a step that the others have decided since then."""
    told = ToldJob(4, min_np=1).training().exited("w3").ready(2, "w0", "w1", "w2").synced("w1", "w2")
    told.feed(AskScale(1)).exited("w2").ready(4, "w0", "w1")
    assert told.members == ("w0", "w1")
    told.synced("w0")
    assert told.told() == {"w0": ["Prepare"], "w1": ["Prepare"]}
    assert told.ready(5, "w0", "w1").members == ("w0",)


@pytest.mark.parametrize(("took_s", "rests_s"), [(0.0005, 0.0), (0.004, 0.016), (0.01, 0.02), (1.0, 1.0)])
def test_the_coordinator_of_a_large_job_gathers_inputs_after_a_long_decision(took_s: float, rests_s: float) -> None:
    assert rest_s(took_s) == pytest.approx(rests_s)
