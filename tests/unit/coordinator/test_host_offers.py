"""The hosts that a job may use: those that are offered, and those whose agents have joined by themselves."""

from __future__ import annotations

from farandole.job.coordinator.agents import HostOffers
from farandole.job.coordinator.transition import HostsOffered


def test_the_host_of_an_agent_counts_as_long_as_the_agent_stays() -> None:
    offers = HostOffers(counts_joined=True)
    assert offers.offer({"a": 2}, may_change=False) == HostsOffered({"a": 2}, may_change=False)
    assert offers.join("b", "b", 4) == HostsOffered({"a": 2, "b": 4}, may_change=True)
    assert offers.leave("b") == HostsOffered({"a": 2}, may_change=True)
    assert offers.leave("b") is None


def test_an_offered_host_does_not_count_twice() -> None:
    offers = HostOffers(counts_joined=True)
    offers.offer({"a": 2}, may_change=False)
    assert offers.join("a", "a", 4) is None
    assert offers.leave("a") is None


def test_a_new_offer_leaves_the_hosts_of_agents_that_have_joined() -> None:
    offers = HostOffers(counts_joined=True)
    offers.join("b", "b", 4)
    assert offers.offer({"a": 2}, may_change=True) == HostsOffered({"a": 2, "b": 4}, may_change=True)


def test_agents_that_join_bring_no_host_where_only_offered_ones_count() -> None:
    offers = HostOffers(counts_joined=False)
    assert offers.join("b", "b", 4) is None
