"""Hosts that are left in good order: their workers go at a boundary, and nothing is started there any more."""

from __future__ import annotations

from farandole.base.events.host_events import HostDrained
from farandole.base.events.worker_events import WorkerEnded
from farandole.base.wire.link_messages import Left, Prepare
from farandole.base.wire.messages import AgentLeaving, Dismissed, ForwardToWorkers, Kill
from farandole.job.coordinator import hosts
from farandole.job.coordinator.transition import AgentLost, AgentReported, Transition
from tests.support.told_job import ToldJob


def two_hosts(num_proc: int = 2, slots: int = 1, **config: object) -> ToldJob:
    """Agents "a" and "b" with so many slots each."""
    return ToldJob(num_proc, slots=slots, **config).connect("b", slots)


def leaving(told: ToldJob, agent: str) -> ToldJob:
    return told.feed(AgentReported(agent, AgentLeaving("SIGTERM was received")))


def prepared(told: ToldJob) -> Prepare:
    (message,) = {message.message for message in told.sent(ForwardToWorkers)}
    assert isinstance(message, Prepare)
    return message


def test_members_of_a_drained_host_leave_at_a_boundary_and_then_its_agent_goes() -> None:
    told = leaving(two_hosts().training(), "b")
    assert told.logged(HostDrained) == [HostDrained("host-b", "SIGTERM was received", ("w1",))]
    assert not told.sent(Kill)
    told.ready(prepared(told).number, "w0", "w1")
    assert told.sent(ForwardToWorkers)[0] == ForwardToWorkers(("w1",), Left())
    assert told.members == ("w0",)
    assert not told.sent(Dismissed)
    assert told.exited("w1", 0).sent(Dismissed) == [Dismissed("host host-b is drained", is_drained=True)]
    assert told.logged(WorkerEnded)


def test_workers_of_a_drained_host_are_wanted_elsewhere() -> None:
    told = leaving(two_hosts(2, slots=2).training(), "a")
    assert told.spawned() == {"w2": 0, "w3": 1}
    assert {worker.slot.agent for worker in told.job.newcomers()} == {"b"}


def test_a_worker_that_is_no_member_yet_is_stopped_at_once() -> None:
    told = leaving(two_hosts(), "b")
    assert [kill.worker for kill in told.sent(Kill)] == ["w1"]


def test_nothing_is_started_on_a_drained_host_also_after_a_loss_there() -> None:
    told = leaving(two_hosts().training(), "b").exited("w1", -9)
    assert told.spawned() == {}
    assert told.sent(Dismissed)


def test_an_agent_that_joins_again_is_as_good_as_new() -> None:
    told = leaving(two_hosts().training(), "b")
    told.ready(prepared(told).number, "w0", "w1").exited("w1", 0)
    assert told.connect("b", 1).spawned() == {"w2": 0}


def test_a_drained_host_that_is_lost_before_it_has_left_is_lost_like_any_other() -> None:
    told = leaving(two_hosts().training(), "b").feed(AgentLost("b", "a test"))
    assert told.ready(told.job.number, "w0").members == ("w0",)


def test_being_asked_twice_changes_nothing() -> None:
    told = leaving(leaving(two_hosts().training(), "b"), "b")
    assert told.actions == []


def test_all_agents_of_a_host_are_drained_by_its_name() -> None:
    told = ToldJob(2, slots=0).connect("b1", 1, "b").connect("b2", 1, "b").training()
    transition = Transition(told.job, told.now_s)
    hosts.drain_host(transition, "c", "a test")
    assert not any(agent.is_draining for agent in transition.job.agents.values())
    hosts.drain_host(transition, "b", "a test")
    assert all(agent.is_draining for agent in transition.job.agents.values())


def test_a_job_that_fills_slots_wants_none_of_a_drained_host() -> None:
    told = ToldJob(2, slots=0, fills_slots=True).offer(x=2, y=1).training()
    leaving(told, "y")
    assert (told.job.target, told.spawned()) == (2, {})
    assert not told.offer(x=2, y=2).spawned()
