"""The hosts of a job that are discovered again and again, by the engine that starts their agents."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from farandole.config import JobConfig
from farandole.engines.discovery import DiscoveryFailed, HostsOver, HostsSource
from farandole.engines.host_list import HostSlots
from farandole.errors import ConfigError
from farandole.events import Event, HostDiscoveryFailed

A, B = HostSlots("localhost", 1), HostSlots("b", 1)


class Answers:
    """A discovery with these answers, one after the other."""

    period_s = 0.0

    def __init__(self, *answers: Sequence[HostSlots] | DiscoveryFailed) -> None:
        self._answers = list(answers)

    async def find(self) -> tuple[HostSlots, ...]:
        answer = self._answers.pop(0)
        if isinstance(answer, DiscoveryFailed):
            raise answer
        return tuple(answer)


def source(events: list[Event], *answers: Sequence[HostSlots] | DiscoveryFailed) -> HostsSource:
    return HostsSource(JobConfig(1), Answers(*answers), True, events.append, are_all_others=True)


def test_the_hosts_of_an_engine_are_its_own_also_if_one_has_the_name_of_this_machine() -> None:
    hosts = source([], [A, B])
    assert asyncio.run(hosts.first()) == (A, B)
    assert hosts.others == {"localhost", "b"}


def test_a_failure_is_repeated_and_the_end_of_all_hosts_is_raised() -> None:
    events: list[Event] = []
    hosts = source(events, [A, B], DiscoveryFailed("no answer"), [A], HostsOver("the job is over"))
    seen: list[tuple[HostSlots, ...]] = []

    async def run() -> None:
        await hosts.first()
        await hosts.follow(seen.append)

    with pytest.raises(HostsOver, match="the job is over"):
        asyncio.run(run())
    assert seen == [(A,)]
    assert events == [HostDiscoveryFailed("no answer")]


def test_an_end_at_the_start_is_an_error_of_the_user() -> None:
    with pytest.raises(ConfigError, match="the job is over"):
        asyncio.run(source([], HostsOver("the job is over")).first())
