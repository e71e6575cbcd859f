"""Horovod's way with new hosts: members hear of them at once, stop at their next commit, and wait for the workers."""

from __future__ import annotations

from farandole.base.wire.link_messages import Prepare
from farandole.base.wire.messages import ForwardToWorkers
from tests.support.told_job import ToldJob


def grown() -> ToldJob:
    """Two members; a host with two more slots has just come."""
    told = ToldJob(2, slots=0, fills_slots=True, waits_for_newcomers=True, start_timeout_s=60.0)
    return told.offer(x=2).training().offer(x=2, y=2)


def test_members_hear_of_new_workers_as_soon_as_these_are_started() -> None:
    told = grown()
    assert told.spawned() == {"w2": 0, "w3": 1}
    (message,) = told.sent(ForwardToWorkers)
    assert message == ForwardToWorkers(("w0", "w1"), Prepare(2, "w2 and w3 join", update=2))


def test_ready_members_wait_until_all_newcomers_are_ready_too() -> None:
    told = grown().ready(2, "w0", "w1").hello("w2").elastic("w2").hello("w3")
    assert told.number == 1
    assert told.elastic("w3").members == ("w0", "w1", "w2", "w3")


def test_newcomers_wait_until_all_members_are_ready() -> None:
    told = grown().hello("w2", "w3").elastic("w2", "w3").ready(2, "w0")
    assert told.number == 1
    assert told.ready(2, "w1").members == ("w0", "w1", "w2", "w3")


def test_a_newcomer_that_dies_is_not_waited_for() -> None:
    told = grown().ready(2, "w0", "w1").hello("w2").elastic("w2").exited("w3")
    assert told.members == ("w0", "w1", "w2")


def test_a_newcomer_that_takes_too_long_is_not_waited_for_again() -> None:
    told = grown().ready(2, "w0", "w1").hello("w2").elastic("w2")
    assert told.deadline_in_s == 60.0
    assert told.passes(60.0).members == ("w0", "w1", "w2")
    quiet = told.synced("w0", "w1", "w2")
    assert quiet.told() == {}
    assert quiet.deadline_in_s is None
    assert told.hello("w3").elastic("w3").told() == {f"w{place}": ["Prepare"] for place in range(3)}


def test_after_a_fault_nobody_waits_for_newcomers() -> None:
    told = grown().ready(2, "w0", "w1").exited("w1")
    assert told.ready(3, "w0").members == ("w0",)
    assert told.synced("w0").told() == {"w0": ["Prepare"]}, "and then it is told again"


def test_a_lost_worker_s_replacement_is_told_of_only_when_it_is_ready() -> None:
    told = ToldJob(2, slots=0, waits_for_newcomers=True).offer(x=2).training().exited("w1").ready(2, "w0")
    assert told.synced("w0").told() == {}
    assert told.hello("w2").elastic("w2").told() == {"w0": ["Prepare"]}


def test_what_comes_and_what_goes_are_told_together() -> None:
    told = ToldJob(2, slots=0, fills_slots=True, waits_for_newcomers=True).offer(x=1, y=1).training()
    told.feed_hosts(y=1, z=1)
    # The agent of z is not there yet.
    assert {message.message for message in told.sent(ForwardToWorkers)} == {Prepare(2, "w0 leaves", update=1)}
    told.connect("z", 1, "z").ready(2, "w0", "w1")
    assert told.number == 1
    assert told.hello("w2").elastic("w2").members == ("w1", "w2")


def test_without_waiting_members_hear_of_new_workers_when_these_are_ready() -> None:
    told = ToldJob(2, slots=0, fills_slots=True).offer(x=2).training().offer(x=2, y=1)
    assert told.told() == {}
    assert told.hello("w2").elastic("w2").told() == {"w0": ["Prepare"], "w1": ["Prepare"]}
