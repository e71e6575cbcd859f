"""No second run trains while a host that was lost may only be cut off."""

from __future__ import annotations

from farandole.base.events.job_events import StateLost
from farandole.base.membership import Origin
from farandole.base.wire.messages import StartWorkers
from farandole.job.coordinator.transition import AgentLost
from tests.support.told_job import ToldJob


def lost_with_a_lease(lease_s: float) -> ToldJob:
    """One worker, on a host that is cut off; another agent's worker is ready to go on from a checkpoint."""
    told = ToldJob(1, slots=1, takes_agents=True, origin=Origin(1, 0, has_checkpoint=True)).training()
    told.connect("b", 1)
    told.feed(AgentLost("a", "a test", told.now_s + lease_s))
    (worker,) = told.spawned()
    return told.hello(worker).elastic(worker)


def test_a_generation_whose_members_may_all_live_is_replaced_only_after_their_lease() -> None:
    told = lost_with_a_lease(2.0)
    assert not told.sent(StartWorkers)
    assert told.deadline_in_s == 2.0
    assert not told.passes(1.9).sent(StartWorkers)
    assert told.passes(0.1).sent(StartWorkers)
    assert told.job.run_id == 2


def test_the_state_is_given_up_for_lost_at_once() -> None:
    told = ToldJob(1, slots=1, takes_agents=True, origin=Origin(1, 0, has_checkpoint=True)).training()
    assert told.feed(AgentLost("a", "a test", told.now_s + 5.0)).logged(StateLost)


def test_a_lease_that_is_over_holds_up_nobody() -> None:
    told = lost_with_a_lease(0.0)
    assert told.number == 2


def test_survivors_do_not_wait_for_a_lease() -> None:
    told = ToldJob(2, slots=1).connect("b", 1).training()
    told.feed(AgentLost("b", "a test", told.now_s + 100.0))
    assert told.ready(told.job.number, "w0").members == ("w0",)


def test_a_job_that_takes_agents_waits_for_another_one_when_the_last_is_lost() -> None:
    told = ToldJob(2, slots=1, takes_agents=True, elastic_timeout_s=30.0).connect("b", 1)
    told.hello("w0", "w1").elastic("w0", "w1").feed(AgentLost("a", "a test"))
    told.feed(AgentLost("b", "a test"))
    assert told.job.ending is None
