"""What a person asks of a job: done, or refused with a reason that helps."""

from __future__ import annotations

import pytest

from farandole.base.events.host_events import HostUndrained
from farandole.base.wire.control import Accepted, AskDrain, AskScale, AskUndrain, Declined, is_drained, is_scaled
from farandole.base.wire.messages import Dismissed
from farandole.job.coordinator.control_requests import judge, status_of
from tests.support.told_job import ToldJob


def asked(told: ToldJob, request: AskScale | AskDrain | AskUndrain) -> Accepted:
    answer = judge(told.job, request)
    assert isinstance(answer, Accepted), answer
    told.feed(request)
    return answer


def refused(told: ToldJob, request: AskScale | AskDrain | AskUndrain) -> str:
    answer = judge(told.job, request)
    assert isinstance(answer, Declined), answer
    return answer.reason


def two_hosts(num_proc: int = 2, slots: int = 2, **config: object) -> ToldJob:
    return ToldJob(num_proc, slots=slots, **config).connect("b", slots).training()


def test_more_workers_are_started_and_fewer_leave_at_a_boundary() -> None:
    told = ToldJob(2, slots=4, max_np=4).training()
    assert asked(told, AskScale(3)).what == "the job will have 3 workers instead of 2"
    assert told.spawned() == {"w2": 2}
    assert not is_scaled(status_of(told.job, told.now_s), 3)
    told.hello("w2").elastic("w2").ready(told.job.number, "w0", "w1").synced("w0", "w1", "w2")
    assert is_scaled(status_of(told.job, told.now_s), 3)
    asked(told, AskScale(1))
    told.ready(told.job.number, "w0", "w1", "w2")
    assert told.members == ("w0",)
    assert is_scaled(status_of(told.job, told.now_s), 1)


def test_what_was_asked_for_already_changes_nothing() -> None:
    told = ToldJob(2, slots=4).training()
    assert asked(told, AskScale(2)) == Accepted("the job already has a target of 2 workers")
    assert told.actions == []


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        (1, "1 worker is fewer than --min-np 2"),
        (5, "5 workers are more than --max-np 4"),
        (4, "there is room for 3 workers (host-a:3), not for 4"),
    ],
)
def test_a_size_that_cannot_be_is_refused_with_the_limit(size: int, reason: str) -> None:
    told = ToldJob(2, slots=3, min_np=2, max_np=4).training()
    assert refused(told, AskScale(size)).startswith(reason)


def test_a_job_that_may_get_hosts_may_be_asked_for_more_than_there_is_room_for() -> None:
    told = ToldJob(1, slots=0).offer(a=1).training()
    assert isinstance(judge(told.job, AskScale(3)), Accepted)


@pytest.mark.parametrize("request_", [AskScale(1), AskDrain("host-a"), AskUndrain("host-a")])
def test_before_the_training_in_a_static_script_and_at_the_end_nothing_can_be_asked(
    request_: AskScale | AskDrain | AskUndrain,
) -> None:
    told = ToldJob(2)
    assert "not all of its workers have called init()" in refused(told, request_)
    told.hello("w0", "w1")
    assert "static script" in refused(told, request_)
    told.elastic("w0", "w1").synced("w0", "w1").finished("w0")
    assert "is finishing" in refused(told, request_)
    told.finished("w1").exited("w0", 0).exited("w1", 0)
    assert "the job is ending" in refused(told, request_)


def test_a_drained_host_is_left_and_undrained_it_is_filled_again() -> None:
    told = two_hosts(3)
    assert asked(told, AskDrain("host-b")).what == "host host-b is being drained: w2 will leave"
    assert not is_drained(status_of(told.job, told.now_s), "host-b")
    told.ready(told.job.number, "w0", "w1", "w2")
    assert told.members == ("w0", "w1")
    assert told.exited("w2", 0).sent(Dismissed)
    assert is_drained(status_of(told.job, told.now_s), "host-b")
    assert asked(told, AskDrain("host-b")).what == "host host-b is already drained"
    asked(told, AskUndrain("host-b"))
    assert told.logged(HostUndrained) == [HostUndrained("host-b")]
    assert told.connect("b", 2).spawned() == {"w3": 0}


def test_a_member_that_has_not_left_yet_stays_when_its_host_is_undrained() -> None:
    told = two_hosts(3)
    asked(told, AskDrain("host-b"))
    asked(told, AskUndrain("host-b"))
    told.ready(told.job.number, "w0", "w1", "w2")
    assert told.members == ("w0", "w1", "w2")
    assert not told.spawned()


def test_a_host_that_the_job_cannot_do_without_is_not_drained() -> None:
    told = two_hosts(3, min_np=3)
    assert refused(told, AskDrain("host-a")) == (
        "without host host-a there is room for 2 workers, and the job needs 3 (--min-np)"
    )


def test_unknown_hosts_are_refused_with_those_there_are() -> None:
    told = two_hosts()
    for request in (AskDrain("c"), AskUndrain("c")):
        assert refused(told, request) == "the job has no host 'c'; its hosts: host-a and host-b"
    assert refused(told, AskUndrain("host-a")) == "host host-a is not drained"
    assert isinstance(judge(told.job, AskDrain("host-b")), Accepted)


def test_an_undrain_that_nobody_needs_changes_nothing() -> None:
    told = two_hosts()
    before = told.job
    assert told.feed(AskUndrain("host-a")).actions == []
    assert told.job == before


def test_hosts_are_listed_in_the_order_of_their_ranks_whoever_connects_first() -> None:
    told = ToldJob(2, slots=0).feed_hosts(x=1, y=1).connect("y", 1, "y").connect("x", 1, "x").training()
    assert "its hosts: x and y" in refused(told, AskDrain("elsewhere"))
    assert [host.host for host in status_of(told.job, told.now_s).hosts] == ["x", "y"]
