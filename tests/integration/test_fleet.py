"""The fleet: which hosts get an agent, when, and what becomes of one that cannot be started."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from farandole.base.config import JobConfig
from farandole.base.events.event import Event
from farandole.base.events.host_events import AgentJoined, AgentNotStarted, HostDrained, HostUndrained
from farandole.base.membership import Address
from farandole.base.wire.authentication import new_token
from farandole.base.wire.messages import Welcome
from farandole.errors import ConfigError
from farandole.job.agent.agent import Agent, AgentConfig
from farandole.job.coordinator.server import Coordinator, CoordinatorSetup
from farandole.job.engines.engine_interface import AgentExit, AgentOrder, Engine, RunningAgent, StartFailed
from farandole.job.engines.fleet import Fleet
from farandole.job.engines.host_list import HostSlots
from farandole.job.engines.local_engine import HostsEngine
from farandole.job.launch.output import OutputOptions, OutputSink
from tests.support.waiting import EventLog, run

BACKOFF = (0.01, 0.04)


class Tried:
    """An engine whose agents end as the test says: each start takes the next end of the list, the last one again and
    again."""

    def __init__(self, *ends: AgentExit | StartFailed) -> None:
        self._ends = list(ends)
        self.orders: list[AgentOrder] = []

    async def start(self, order: AgentOrder) -> RunningAgent:
        self.orders.append(order)
        end = self._ends.pop(0) if len(self._ends) > 1 else self._ends[0]
        if isinstance(end, StartFailed):
            raise end
        return Ended(end)

    async def close(self) -> None:
        pass


class Ended:
    """An agent that has ended at once."""

    def __init__(self, end: AgentExit) -> None:
        self._end = end

    async def wait(self) -> AgentExit:
        return self._end

    def kill_workers(self) -> None:
        pass

    async def close(self) -> None:
        pass


def order_for(host: HostSlots) -> AgentOrder:
    return AgentOrder(host.name, host.slots, (Address("127.0.0.1", 1),), b"t" * 32)


def fleet_of(engine: Engine, events: EventLog, gone: list[tuple[str, str]], must_succeed: bool = True) -> Fleet:
    return Fleet(
        engine,
        order_for,
        on_gone=lambda host, reason: gone.append((host, reason)),
        on_event=events,
        is_over=lambda: False,
        must_succeed=must_succeed,
        again_s=BACKOFF,
    )


async def no_addresses() -> tuple[Address, ...]:
    return ()


def test_a_host_that_can_never_be_used_ends_the_job_before_it_trains() -> None:
    async def test() -> None:
        fleet = fleet_of(Tried(StartFailed("its key was refused", is_final=True)), EventLog(), [])
        fleet.follow([HostSlots("b", 1)])
        with pytest.raises(ConfigError, match="host b: its key was refused"):
            await fleet.gone()
        await fleet.close()

    run(test())


def test_a_host_that_fails_later_is_tried_again_ever_more_rarely() -> None:
    async def test() -> None:
        events, gone = EventLog(), list[tuple[str, str]]()
        ends = (StartFailed("no route"), AgentExit("it crashed", is_final=True, are_workers_gone=False))
        engine = Tried(*ends, AgentExit("its power failed"))
        fleet = fleet_of(engine, events, gone)
        fleet.training_begins()
        fleet.follow([HostSlots("b", 1)])
        while len(engine.orders) < 5:
            await asyncio.sleep(0.005)
        await fleet.close()
        failures = events.of(AgentNotStarted)
        assert [each.reason for each in failures[:3]] == ["no route", "it crashed", "its power failed"]
        assert failures[0].again_s < failures[1].again_s < failures[2].again_s
        assert all(each.again_s <= 1.2 * BACKOFF[1] for each in failures)
        assert gone[0] == ("b", "its power failed"), "the engine has not seen that the workers are gone before"

    run(test())


def test_a_discovered_host_that_cannot_be_used_never_ends_the_job() -> None:
    async def test() -> None:
        events = EventLog()
        fleet = fleet_of(Tried(StartFailed("its key was refused", is_final=True)), events, [], must_succeed=False)
        fleet.follow([HostSlots("b", 1)])
        while len(events.of(AgentNotStarted)) < 3:
            await asyncio.sleep(0.005)
        fleet.follow([])
        await fleet.gone()
        await fleet.close()

    run(test())


def test_a_drained_host_gets_no_other_agent_before_it_has_been_gone() -> None:
    async def test() -> None:
        token, events = new_token(), EventLog()

        def on_event(event: Event) -> None:
            if isinstance(event, HostDrained | HostUndrained):
                fleet.on_decision(event)
            events(event)

        coordinator = Coordinator(CoordinatorSetup(JobConfig(num_proc=1), token, "job"), on_event=on_event)
        await coordinator.start()
        serving = asyncio.create_task(coordinator.run())
        sink = OutputSink(OutputOptions())
        made: list[Agent] = []

        command = (sys.executable, "-c", "import time; time.sleep(60)")
        job = Welcome("job", command, "", dict(os.environ), 3.0, 0.1, is_elastic=False)

        def make_agent(order: AgentOrder) -> Agent:
            config = AgentConfig(
                name=order.host,
                host=order.host,
                slots=order.slots,
                coordinator=coordinator.address,
                token=token,
                job=job,
            )
            made.append(Agent(config, sink, events))
            return made[-1]

        fleet = fleet_of(HostsEngine(make_agent, None, (), no_addresses), events, [])
        try:
            for _ in range(2):
                joined = asyncio.create_task(events.next(AgentJoined))
                await asyncio.sleep(0)
                fleet.follow([HostSlots("a", 1)])
                await joined
                made[-1].leave("a test")
                await fleet.gone()
                fleet.follow([HostSlots("a", 1)])
                await fleet.gone()  # at once: none was started
                fleet.follow([])
            assert len(made) == len(events.of(HostDrained)) == 2
        finally:
            await fleet.close()
            serving.cancel()
            await asyncio.wait([serving])
            sink.close()

    run(test())
