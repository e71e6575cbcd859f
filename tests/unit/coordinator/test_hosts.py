"""Hosts that are offered, added and removed: which slots are used, in which order, and how their workers leave."""

from __future__ import annotations

from farandole.base.events.host_events import HostAdded, HostRemoved
from farandole.base.membership import Placement
from farandole.base.wire.link_messages import Leaving, Prepare
from farandole.base.wire.messages import Dismissed, ForwardToWorkers, Kill, Spawn, StartWorkers
from tests.support.told_job import ToldJob


def hosts_job(num_proc: int = 2, **config: object) -> ToldJob:
    """A job that fills all slots that are offered, without any agent yet."""
    return ToldJob(num_proc, slots=0, fills_slots=True, **config)


def prepared(told: ToldJob) -> Prepare:
    (message,) = {message.message for message in told.sent(ForwardToWorkers)}
    assert isinstance(message, Prepare)
    return message


def test_slots_are_filled_host_by_host_also_when_a_later_host_s_agent_is_the_first_to_join() -> None:
    told = ToldJob(3, slots=0).feed_hosts(x=2, y=2)
    assert told.connect("y", 2, "y").spawned() == {"w0": 0}  # one slot here, after the two of x
    assert told.connect("x", 2, "x").spawned() == {"w1": 0, "w2": 1}
    assert told.hello("w0", "w1", "w2").members == ("w1", "w2", "w0")


def test_ranks_follow_the_launcher_s_own_hosts_where_others_may_join_first() -> None:
    told = ToldJob(4, slots=0, first_hosts={"x": 2, "y": 1}, takes_agents=True)
    assert told.connect("z", 2, "z").spawned() == {"w0": 0}  # one slot here, after those of x and y
    assert told.connect("y", 1, "y").spawned() == {"w1": 0}
    assert told.connect("x", 2, "x").spawned() == {"w2": 0, "w3": 1}
    assert told.hello("w0", "w1", "w2", "w3").members == ("w2", "w3", "w1", "w0")


def test_workers_are_told_the_place_that_they_will_most_likely_get() -> None:
    told = ToldJob(3, slots=0).offer(x=2, y=2)
    assert [spawn.expected for spawn in told.sent(Spawn)] == [
        Placement(0, 3, 0, 2, 0, 2),
        Placement(1, 3, 1, 2, 0, 1),
        Placement(2, 3, 0, 1, 1, 2),
    ]


def test_later_workers_expect_a_place_behind_the_members_that_stay() -> None:
    told = hosts_job().offer(x=2).training().offer(x=2, y=2)
    assert [spawn.expected and spawn.expected.rank for spawn in told.sent(Spawn)] == [2, 3]
    told = hosts_job().offer(x=2, y=1).training().offer(y=1, z=2)
    assert [spawn.expected and spawn.expected.rank for spawn in told.sent(Spawn)] == [1, 2]


def test_a_job_that_fills_slots_takes_all_that_are_offered_up_to_max_np() -> None:
    assert len(hosts_job().offer(x=2, y=2).job.workers) == 4
    assert len(hosts_job(max_np=3).offer(x=2, y=2).job.workers) == 3
    assert len(ToldJob(2, slots=0).offer(x=2, y=2).job.workers) == 2


def test_it_begins_only_when_there_are_slots_for_np_workers() -> None:
    told = hosts_job(3).offer(x=2).hello("w0", "w1")
    assert told.number == 0
    told.offer(x=2, y=1).hello("w2")
    assert told.members == ("w0", "w1", "w2")


def test_no_host_at_the_beginning_is_waited_for_with_a_deadline() -> None:
    told = hosts_job(start_timeout_s=30.0).offer()
    assert told.deadline_in_s == 30.0
    assert "the agents offer only 0 slots for 2 workers" in told.passes(30.0).ending[1]


def test_new_slots_of_a_known_host_are_filled_too() -> None:
    told = hosts_job().offer(x=2).training().offer(x=3)
    assert told.spawned() == {"w2": 2}
    assert told.feed_hosts(x=4).logged(HostAdded)[0].line() == "host x now offers 4 slots instead of 3"


def test_workers_of_a_removed_host_leave_at_a_boundary_and_then_its_agent_goes() -> None:
    told = hosts_job().offer(x=2, y=2).training().offer(y=2)
    assert prepared(told) == Prepare(2, "w0 and w1 leave", update=1)
    (removed,) = told.logged(HostRemoved)
    assert removed.line() == "host x is no longer offered; workers that leave: w0, w1"
    starts = told.ready(2, "w0", "w1", "w2", "w3").starts()
    assert {name: start.placement.rank for name, start in starts.items()} == {"w2": 0, "w3": 1}
    assert told.exited("w0", 0).sent(Dismissed) == []
    assert len(told.exited("w1", 0).sent(Dismissed)) == 1


def test_a_removed_slot_is_left_and_the_others_of_its_host_go_on() -> None:
    told = hosts_job().offer(x=3).training().offer(x=2)
    assert prepared(told).reason == "w2 leaves"
    assert told.ready(2, "w0", "w1", "w2").members == ("w0", "w1")
    assert told.exited("w2", 0).sent(Dismissed) == []


def test_workers_that_are_no_members_are_stopped_at_once_when_their_host_goes() -> None:
    told = hosts_job().offer(x=2).training().offer(x=2, y=1).offer(x=2)
    assert [kill.worker for kill in told.sent(Kill)] == ["w2"]
    assert told.exited("w2", -15).sent(Dismissed)


def test_a_host_that_reappears_works_again_with_a_new_agent() -> None:
    told = hosts_job().offer(x=2, y=1).training().offer(x=2).ready(2, "w0", "w1", "w2").exited("w2", 0)
    assert told.members == ("w0", "w1")
    assert told.offer(x=2, y=1).spawned() == {"w3": 0}


def test_a_host_that_reappears_before_the_boundary_keeps_its_workers() -> None:
    told = hosts_job().offer(x=2, y=1).training().offer(x=2).offer(x=2, y=1)
    assert told.spawned() == {}
    assert told.ready(2, "w0", "w1", "w2").members == ("w0", "w1", "w2")


def test_the_oldest_hosts_keep_the_lowest_ranks_whatever_order_is_said() -> None:
    told = hosts_job(1).offer(x=1).training().offer(y=1, x=1).hello("w1").elastic("w1").ready(2, "w0")
    assert told.members == ("w0", "w1")


def test_the_state_is_handed_over_when_every_host_is_replaced() -> None:
    told = hosts_job(1).offer(x=1).training().offer(y=1)
    assert told.spawned() == {"w1": 0}
    told.hello("w1").elastic("w1").ready(2, "w0")
    assert told.members == ("w0", "w1")
    assert [*told.synced("w0", "w1").ready(3, "w0", "w1").members] == ["w1"]


def test_the_last_holder_of_the_state_stays_as_long_as_no_other_host_is_there() -> None:
    told = hosts_job(1).offer(x=2).training().offer()
    assert told.ready(2, "w0", "w1").members == ("w0",)
    assert told.job.ending is None


def test_a_worker_that_was_asked_to_leave_is_not_replaced_in_its_slot() -> None:
    told = hosts_job().offer(x=3).training().says("w2", Leaving()).ready(2, "w0", "w1", "w2").exited("w2", 0)
    assert (told.spawned(), told.job.target) == ({}, 2)


def test_a_static_script_gets_no_further_workers() -> None:
    told = hosts_job(1).offer(x=1).hello("w0").offer(x=1, y=1)
    assert told.spawned() == {}
    assert told.elastic("w0").spawned() == {"w1": 0}


def test_one_host_s_members_get_their_start_from_its_agent() -> None:
    told = hosts_job().offer(x=1, y=1).hello("w0", "w1")
    assert [tuple(message.starts) for message in told.sent(StartWorkers)] == [("w0",), ("w1",)]
