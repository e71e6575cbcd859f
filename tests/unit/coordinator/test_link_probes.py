"""Probes prove which links between living workers are broken: both ends have to say so."""

from __future__ import annotations

import pytest

from farandole.base.events.generation_events import LinksDistrusted, RegroupBegan
from farandole.base.wire.link_messages import Probe, Probed
from farandole.base.wire.messages import ForwardToWorkers, Kill
from farandole.job.coordinator.broken_links import cover_but_one_holder, spread_to_hosts
from tests.support.told_job import ToldJob

WAIT_S = 0.375  # an eighth of the budget of 3 s


def found(told: ToldJob, worker: str, unreachable: str = "", reachable: str = "") -> ToldJob:
    return told.says(worker, Probed(told.number, tuple(reachable.split()), tuple(unreachable.split())))


def stopped(told: ToldJob) -> list[str]:
    return [kill.worker for kill in told.sent(Kill)]


def asked(told: ToldJob) -> list[str]:
    return [
        name
        for message in told.sent(ForwardToWorkers)
        if isinstance(message.message, Probe)
        for name in message.workers
    ]


def hosts(num_proc: int, **slots: int) -> ToldJob:
    """Agents with so many slots each, in this order."""
    (first, count), *others = slots.items()
    told = ToldJob(num_proc, slots=0).connect(first, count)
    for agent, number in others:
        told.connect(agent, number)
    return told.training()


def test_a_link_that_both_ends_say_is_broken_costs_one_of_them_and_no_generation_in_vain() -> None:
    told = ToldJob(3).training()
    assert asked(found(told, "w0", "w1", "w2")) == ["w1"]
    found(told, "w1", "w0", "w2")
    assert told.deadline_in_s == WAIT_S
    assert not told.sent(Kill)
    told.passes(WAIT_S)
    assert stopped(told) == ["w1"]
    assert told.logged(LinksDistrusted) == [LinksDistrusted(1, ("w0-w1",), ("w1",), is_proved=True)]
    assert not told.logged(RegroupBegan)
    assert told.exited("w1").ready(2, "w0", "w2").members == ("w0", "w2")


def test_one_end_alone_proves_nothing_since_the_other_may_be_dead() -> None:
    told = found(ToldJob(2).training(), "w0", "w1")
    assert told.deadline_in_s is None
    assert not told.passes(60.0).sent(Kill)


def test_the_other_end_is_asked_once_and_its_answer_may_clear_the_link() -> None:
    told = ToldJob(2).training()
    assert asked(found(told, "w0", "w1")) == ["w1"]
    assert asked(found(told, "w0", "w1")) == []
    assert found(told, "w1", "", "w0").deadline_in_s is None


def test_what_was_found_longer_ago_than_the_budget_counts_no_more() -> None:
    told = found(ToldJob(2).training(), "w0", "w1")
    told.now_s += 3.1
    assert asked(found(told, "w1", "w0")) == ["w0"]
    assert told.deadline_in_s is None


def test_a_link_that_works_again_before_the_verdict_costs_nobody() -> None:
    told = found(found(ToldJob(3).training(), "w0", "w1"), "w1", "w0")
    found(told, "w0", "", "w1").passes(WAIT_S)
    assert stopped(told) == []
    assert told.deadline_in_s is None


def test_reports_of_failed_connections_that_the_verdict_does_not_explain_are_not_forgotten() -> None:
    told = found(found(ToldJob(3).training().link_broken("w0", "w1"), "w0", "w1"), "w1", "w0")
    found(told, "w0", "", "w1").passes(0.5)
    assert told.logged(RegroupBegan)


def test_a_regroup_with_the_same_members_waits_for_the_word_of_the_other_end() -> None:
    told = found(ToldJob(3).training().link_broken("w0", "w1"), "w0", "w1", "w2").passes(0.5)
    assert not told.logged(RegroupBegan)
    found(told, "w1", "w0", "w2").passes(WAIT_S)
    assert stopped(told) == ["w1"]


def test_it_does_not_wait_for_that_word_for_ever() -> None:
    told = found(ToldJob(3).training().link_broken("w0", "w1"), "w0", "w1", "w2").passes(0.5)
    assert told.deadline_in_s == pytest.approx(1.0)  # half a budget after the probe
    assert told.passes(1.0).logged(RegroupBegan)


@pytest.mark.parametrize("number", [0, 2])
def test_findings_of_other_generations_are_ignored(number: int) -> None:
    told = ToldJob(2).training()
    for worker, peer in (("w0", "w1"), ("w1", "w0")):
        told.says(worker, Probed(number, (), (peer,)))
    assert told.deadline_in_s is None
    assert told.job.links.findings == {}


def test_findings_during_a_regroup_and_about_strangers_are_ignored() -> None:
    told = ToldJob(3).training().exited("w2")
    assert found(found(told, "w0", "w1"), "w1", "w0").job.links.findings == {}
    told = found(ToldJob(2).training(), "w0", "w9 w0")
    assert told.job.links.findings["w0"].unreachable == frozenset()


def test_a_worker_whose_code_raised_explains_that_it_cannot_be_reached() -> None:
    told = found(found(ToldJob(3).training(), "w0", "w1"), "w1", "w0").raised("w1", "ValueError: x", exits=False)
    assert stopped(told.passes(WAIT_S)) == []


def test_all_bad_links_are_waited_for_so_that_the_fewest_workers_go() -> None:
    told = ToldJob(3).training()
    found(found(told, "w0", "w1"), "w1", "w0 w2")
    told.now_s += 0.1
    assert stopped(told) == []
    assert stopped(found(told, "w2", "w1")) == ["w1"]


def test_when_all_have_spoken_there_is_nothing_to_wait_for() -> None:
    told = found(found(ToldJob(2).training(), "w0", "w1"), "w1", "w0")
    assert stopped(told) == ["w1"]
    assert told.deadline_in_s is None


def test_between_hosts_all_workers_of_the_smaller_one_go_not_only_those_at_the_ends() -> None:
    told = hosts(5, a=2, b=3)  # the ring: a0 a1 b0 b1 b2
    for worker, peer in (("w1", "w2"), ("w2", "w1"), ("w0", "w4"), ("w4", "w0")):
        found(told, worker, peer)
    assert stopped(told.passes(WAIT_S)) == ["w0", "w1"]


def test_between_hosts_of_equal_size_the_older_one_stays() -> None:
    told = hosts(4, a=2, b=2)
    for worker, peer in (("w1", "w2"), ("w2", "w1")):
        found(told, worker, peer)
    assert stopped(told.passes(WAIT_S)) == ["w2", "w3"]


def test_where_another_connection_between_the_hosts_works_only_the_ends_are_to_blame() -> None:
    told = hosts(4, a=2, b=2)
    found(told, "w0", "", "w3 w1")
    found(found(told, "w1", "w2"), "w2", "w1")
    assert spread_to_hosts(told.job, [("w1", "w2")], told.now_s) == {("w1", "w2")}
    assert stopped(told.passes(WAIT_S)) == ["w2"]


def test_the_only_holder_of_the_state_stays_whatever_it_costs() -> None:
    told = ToldJob(3).hello("w0", "w1", "w2").elastic("w0", "w1", "w2").synced("w1")
    assert cover_but_one_holder(told.job, [("w0", "w1"), ("w1", "w2")]) == ["w0", "w2"]
    for worker, peers in (("w1", "w0 w2"), ("w0", "w1"), ("w2", "w1")):
        found(told, worker, peers)
    assert stopped(told) == ["w0", "w2"]


def test_replacements_that_meet_the_same_broken_link_are_started_within_the_restart_budget_only() -> None:
    told = ToldJob(2, restarts=2).training()
    newest, pauses = "w1", []
    for _ in range(3):
        found(found(told, "w0", newest), newest, "w0")
        assert stopped(told) == [newest]
        spawned = list(told.exited(newest).spawned())
        told.ready(told.job.number, "w0").synced("w0")
        pauses.append(told.deadline_in_s or 0.0)
        if not spawned and pauses[-1]:  # the slot is in backoff
            spawned = list(told.passes(pauses[-1]).spawned())
        if spawned:
            (newest,) = spawned
            told.hello(newest).elastic(newest).ready(told.job.number, "w0")
            assert told.members == ("w0", newest)
    assert spawned == []
    assert told.members == ("w0",)
    assert pauses[1] > pauses[0]
