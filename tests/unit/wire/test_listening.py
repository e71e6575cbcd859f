"""Limits on connections that have not proved who they are."""

from __future__ import annotations

import asyncio
import socket

import pytest

from farandole.base.events.job_events import ConnectionRefused
from farandole.base.wire.listening import FailureBudget, Listener, RefusalReports, Strangers
from farandole.base.wire.sockets import listening_sockets
from tests.support.waiting import DEADLINE_S, run


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_oldest_stranger_makes_room_and_who_has_proved_itself_does_not() -> None:
    dropped: list[str] = []
    strangers: Strangers[str] = Strangers(dropped.append, FailureBudget(Clock()), most=2)
    for name in "abc":
        strangers.add(name)
    assert dropped == ["a"]
    strangers.proved("b")
    strangers.add("d")
    assert dropped == ["a"]
    assert list(strangers) == ["c", "d"]


def test_failures_that_come_too_fast_delay_the_next_connections_and_time_mends_it() -> None:
    clock = Clock()
    budget = FailureBudget(clock)
    for _ in range(500):
        budget.count()
    assert budget.pause_s() == 0.0
    for _ in range(750):
        budget.count()
    assert budget.pause_s() == 1.0
    clock.now_s = 1.0
    assert budget.pause_s() == 0.0
    clock.now_s = 1000.0
    for _ in range(500):  # no more than that is saved up
        budget.count()
    assert budget.pause_s() == 0.0
    budget.count()
    assert budget.pause_s() > 0.0


def test_a_proved_connection_that_ends_costs_nothing() -> None:
    budget = FailureBudget(Clock())
    strangers: Strangers[int] = Strangers(lambda _: None, budget)
    for number in range(10_000):
        strangers.add(number)
        strangers.proved(number)
        strangers.failed(number)
    assert budget.pause_s() == 0.0


def test_of_many_refusals_some_are_reported_and_the_others_counted() -> None:
    clock, events = Clock(), list[ConnectionRefused]()
    reports = RefusalReports(events.append, clock)
    for number in range(1000):
        reports(ConnectionRefused(f"10.0.0.{number}", "no proof"))
    assert len(events) == 10
    reports.flush()
    assert len(events) == 10
    clock.now_s = 10.0
    reports.flush()
    assert events[10].line() == ("refused a connection from 990 others: the last one was 10.0.0.999: no proof")
    reports.flush()
    reports(ConnectionRefused("a", "b"))
    assert len(events) == 12


def test_a_listener_stops_accepting_while_the_budget_is_used_up() -> None:
    async def test() -> None:
        budget = FailureBudget(Clock())
        accepted: list[str] = []

        def refuse(connected: socket.socket, who: str) -> None:
            connected.close()
            budget.count()
            accepted.append(who)

        listener = Listener(refuse, budget)
        listener.open(listening_sockets(["127.0.0.1"]))
        (address,) = listener.addresses
        dialed = [socket.create_connection((address.host, address.port), DEADLINE_S) for _ in range(600)]
        while len(accepted) < 501:
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(accepted) < 520
        listener.close()
        for each in dialed:
            each.close()

    run(test())


def test_an_address_that_this_machine_does_not_have_is_left_out_unless_it_is_the_only_one() -> None:
    elsewhere = "203.0.113.7"  # RFC 5737: of documentation, so of nobody
    for hosts in ([elsewhere, "127.0.0.1"], ["127.0.0.1", elsewhere]):
        (bound,) = listening_sockets(hosts)
        assert bound.getsockname()[0] == "127.0.0.1"
        bound.close()
    with pytest.raises(OSError, match="Cannot assign requested address"):
        listening_sockets([elsewhere])
