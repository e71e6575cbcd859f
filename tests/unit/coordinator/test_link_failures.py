"""Reports of failed connections are hints: wait for an exit, then regroup, then stop the fewest workers."""

from __future__ import annotations

import pytest

from farandole.base.events.generation_events import TransportChosen
from farandole.base.wire.link_messages import Connected, LinkBroken
from farandole.base.wire.messages import Kill
from farandole.job.coordinator.broken_links import cover_but_one_holder, smallest_cover
from tests.support.told_job import ToldJob


def retried(told: ToldJob, times: int) -> ToldJob:
    """w0 and w1 cannot connect, again and again."""
    for _ in range(times):
        told.link_broken("w0", "w1").passes(0.5)
        if told.job.change:
            told.ready(told.job.change.number, *told.members)
    return told


def test_an_exit_within_half_a_second_explains_the_report() -> None:
    told = ToldJob(3).training().link_broken("w0", "w1")
    assert (told.actions, told.deadline_in_s) == ([], 0.5)
    told.now_s += 0.1
    told.exited("w1").ready(2, "w0", "w2")
    assert told.number == 2
    assert told.deadline_in_s is None


def test_an_unexplained_report_leads_to_a_generation_with_the_same_members() -> None:
    told = ToldJob(3).training().link_broken("w0", "w1").passes(0.5)
    assert set(told.told()) == {"w0", "w1", "w2"}
    assert told.ready(2, "w0", "w1", "w2").members == ("w0", "w1", "w2")


@pytest.mark.parametrize(("number", "peer"), [(2, "w1"), (0, "w1"), (1, "w9"), (1, "w0")])
def test_reports_of_other_generations_and_of_strangers_are_ignored(number: int, peer: str) -> None:
    told = ToldJob(3).training().says("w0", LinkBroken(number, peer, "send", ""))
    assert told.deadline_in_s is None


def test_a_report_during_a_regroup_is_ignored() -> None:
    told = ToldJob(3).training().exited("w2").says("w0", LinkBroken(1, "w1", "send", ""))
    assert told.deadline_in_s is None


@pytest.mark.parametrize(("reporter", "peer"), [("w0", "w1"), ("w0", "w2")])
def test_a_worker_whose_code_raised_explains_links_until_it_is_gone(reporter: str, peer: str) -> None:
    told = ToldJob(3).training().raised("w1", "ValueError: x", exits=False).link_broken(reporter, peer)
    for _ in range(9):
        assert told.deadline_in_s == 0.5
        assert told.passes(0.5).job.change is None
    assert [kill.worker for kill in told.passes(0.5).sent(Kill)] == ["w1"]
    assert told.exited("w1").ready(2, "w0", "w2").members == ("w0", "w2")


def test_after_two_such_generations_in_a_row_the_newest_of_the_two_is_stopped() -> None:
    told = retried(ToldJob(3).training(), 2)
    assert told.number == 3
    told.link_broken("w0", "w1").passes(0.5)
    assert [(kill.worker, kill.grace_s) for kill in told.sent(Kill)] == [("w1", 0.0)]
    told.exited("w1", -9)
    assert told.spawned() == {"w3": 1}
    assert set(told.told()) == {"w0", "w2"}


def test_a_generation_that_all_members_confirmed_ends_the_row() -> None:
    told = retried(ToldJob(3).training(), 2).synced("w0", "w1", "w2")
    assert retried(told, 1).number == 4


def test_the_same_holder_is_kept_rather_than_one_without_state() -> None:
    told = ToldJob(2).hello("w0", "w1").elastic("w0", "w1").synced("w1")
    retried(told, 2).link_broken("w0", "w1").passes(0.5)
    assert [kill.worker for kill in told.sent(Kill)] == ["w0"]


@pytest.mark.parametrize(
    ("links", "cover"),
    [
        ("ab", "b"),
        ("ab bc", "b"),
        ("ab bc cd de", "bd"),
        ("ab ac ad", "a"),
        ("ab cd", "bd"),
    ],
)
def test_the_smallest_set_of_workers_that_covers_the_bad_links_is_stopped(links: str, cover: str) -> None:
    pairs = [(link[0], link[1]) for link in links.split()]
    assert smallest_cover(pairs, "abcde") == list(cover)


@pytest.mark.parametrize("size", range(3, 12))
def test_a_circle_of_bad_links_costs_half_of_its_workers(size: int) -> None:
    names = [f"w{index}" for index in range(size)]
    circle = [(names[index - 1], names[index]) for index in range(size)]
    assert len(smallest_cover(circle, names)) == (size + 1) // 2


def test_how_tensors_move_is_said_and_changes_nothing() -> None:
    told = ToldJob(2).training()
    before = told.job
    told.says("w0", Connected(1, "over TCP"))
    assert told.logged(TransportChosen) == [TransportChosen(1, "over TCP")]
    assert told.job == before


def test_a_member_without_state_is_stopped_rather_than_one_of_several_holders() -> None:
    told = ToldJob(3).hello("w0", "w1", "w2").elastic("w0", "w1", "w2").synced("w0", "w2")
    assert cover_but_one_holder(told.job, [("w1", "w2")]) == ["w1"]


def test_a_member_that_left_by_itself_is_named_with_its_reason() -> None:
    told = ToldJob(3).training().says("w1", LinkBroken(1, "w2", "left", "the script raised HostsUpdatedInterrupt"))
    told.link_broken("w0", "w1").passes(0.5)
    assert told.job.change is not None
    assert told.job.change.reason == "w1: the script raised HostsUpdatedInterrupt"
