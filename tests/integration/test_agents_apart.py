"""The coordinator's shell and agents apart from it: who may join, and whose silence, in which direction, counts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator
from typing import TypeVar

import psutil
import pytest

from farandole.base.config import JobConfig
from farandole.base.events.host_events import AgentJoined, AgentWasLost, HostDrained
from farandole.base.liveness.heartbeats import HeartbeatSeal
from farandole.base.membership import Address
from farandole.base.wire.authentication import Role, new_token
from farandole.base.wire.channel import Channel, connect
from farandole.base.wire.frames import TO_AGENT
from farandole.base.wire.message import PROTOCOL_VERSION, Message
from farandole.base.wire.messages import (
    AgentDied,
    AgentHello,
    CoordinatorHeartbeat,
    GuardHello,
    Heartbeat,
    OutputMessage,
    Refused,
    Spawn,
    ToAgent,
    Welcome,
    WorkerPrinted,
)
from farandole.job.agent.coordinator_session import HeartbeatSocket
from farandole.job.coordinator.server import Coordinator, CoordinatorSetup
from tests.support.waiting import DEADLINE_S, EventLog, run

pytestmark = [pytest.mark.long, pytest.mark.alone]

TOKEN = new_token()
BUDGET_S = 0.6

MessageT = TypeVar("MessageT", bound=Message)


class Apart:
    """An agent's end of a connection. It heartbeats when the test says so."""

    def __init__(self, channel: Channel[ToAgent]) -> None:
        self.channel = channel
        self.sequence = 0

    async def hear(self, kind: type[MessageT]) -> MessageT:
        """The next message of this kind; others are passed over."""
        while True:
            message = await asyncio.wait_for(self.channel.receive(), DEADLINE_S)
            if isinstance(message, kind):
                return message

    async def live(self, acknowledges: bool) -> None:
        """Answer each heartbeat, until the connection ends."""
        with contextlib.suppress(ConnectionError):
            while True:
                heartbeat = await self.hear(CoordinatorHeartbeat)
                self.sequence += 1
                self.channel.send(Heartbeat(self.sequence, heartbeat.sequence if acknowledges else 0))


class Served:
    def __init__(self, coordinator: Coordinator, events: EventLog) -> None:
        self.coordinator, self.events = coordinator, events
        self.printed: list[tuple[str, OutputMessage | None]] = []
        self.agents: list[Apart] = []

    async def dial(self, process: str = "p", slots: int = 1) -> Apart:
        address = self.coordinator.address
        channel = await connect(address.host, address.port, TOKEN, None, TO_AGENT)
        channel.send(AgentHello("b", "b", slots, PROTOCOL_VERSION, process=process, is_apart=True))
        self.agents.append(Apart(channel))
        return self.agents[-1]


@contextlib.asynccontextmanager
async def serving(
    budget_s: float = BUDGET_S, takes_agents: bool = True, command: tuple[str, ...] = ("true",)
) -> AsyncIterator[Served]:
    events = EventLog()
    welcome = Welcome("job", command, "/", {}, budget_s, 0.1, is_elastic=True) if takes_agents else None
    config = JobConfig(num_proc=1, detection_budget_s=budget_s, takes_agents=takes_agents)
    printed: list[tuple[str, OutputMessage | None]] = []
    coordinator = Coordinator(
        CoordinatorSetup(config, TOKEN, "job", welcome=welcome),
        on_event=events,
        on_output=lambda agent, message: printed.append((agent, message)),
    )
    await coordinator.start()
    serving = asyncio.create_task(coordinator.run())
    served = Served(coordinator, events)
    served.printed = printed
    try:
        yield served
    finally:
        for agent in served.agents:
            agent.channel.abort()
        serving.cancel()
        await asyncio.wait([serving], timeout=DEADLINE_S)


def test_an_agent_is_welcomed_before_it_gets_orders_and_its_output_is_handed_on() -> None:
    async def test() -> None:
        async with serving() as served:
            agent = await served.dial()
            assert isinstance(await asyncio.wait_for(agent.channel.receive(), DEADLINE_S), Welcome)
            await agent.hear(Spawn)
            printed = WorkerPrinted("w0", "stdout", (b"hello",))
            agent.channel.send(printed)
            while not served.printed:
                await asyncio.sleep(0.001)
            assert served.printed == [("b", printed)]

    run(test())


def test_the_system_that_started_an_agent_may_report_that_it_leaves_or_is_gone() -> None:
    async def test() -> None:
        async with serving() as served:
            agent = await served.dial()
            await agent.hear(Spawn)
            served.coordinator.agent_leaves("unknown", "its pod is being deleted")
            served.coordinator.agent_leaves("b", "its pod is being deleted")
            served.coordinator.agent_leaves("b", "its pod is being deleted")
            assert [event.host for event in served.events.of(HostDrained)] == ["b"]
            served.coordinator.agent_gone("b", "its pod was deleted", are_workers_gone=False)
            served.coordinator.agent_gone("b", "its pod was deleted")
            assert [event.reason for event in served.events.of(AgentWasLost)] == ["its pod was deleted"]

    run(test())


def test_an_agent_that_acknowledges_beats_is_kept() -> None:
    async def test() -> None:
        async with serving() as served:
            agent = await served.dial()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(agent.live(acknowledges=True), 3 * BUDGET_S)
            assert served.events.of(AgentWasLost) == []

    run(test())


def test_an_agent_that_is_heard_but_hears_nothing_is_lost_within_the_budget() -> None:
    async def test() -> None:
        async with serving() as served:
            agent = await served.dial()
            lost = asyncio.create_task(served.events.next(AgentWasLost))
            begin_s = asyncio.get_running_loop().time()
            await agent.live(acknowledges=False)
            assert "nothing was received" in (await lost).reason
            assert asyncio.get_running_loop().time() - begin_s < 2 * BUDGET_S

    run(test())


def test_other_messages_than_beats_are_no_sign_that_an_agent_hears() -> None:
    async def test() -> None:
        async with serving() as served:
            agent = await served.dial()
            lost = asyncio.create_task(served.events.next(AgentWasLost))
            while not lost.done():
                agent.channel.send(WorkerPrinted("w0", "stdout", (b"still here",)))
                await asyncio.sleep(BUDGET_S / 20)
            assert served.printed[-1] == ("b", None), "nothing more is to be shown of its workers"

    run(test())


def test_datagrams_alone_keep_an_agent_and_forged_ones_do_not() -> None:
    async def test() -> None:
        async with serving(budget_s=0.3) as served:
            agent = await served.dial()
            welcome = await agent.hear(Welcome)
            assert welcome.heartbeat_port == served.coordinator.address.port
            heard = [0]
            real = HeartbeatSocket(TOKEN, welcome.heartbeat_id, lambda sequence, _: heard.append(sequence))
            forged = HeartbeatSocket(new_token(), welcome.heartbeat_id, lambda _sequence, _heard: None)
            to = Address("127.0.0.1", welcome.heartbeat_port)
            for each in (real, forged):
                await each.open(to)
            try:
                for sequence in range(1, 41):  # four budgets
                    real.send(sequence, heard[-1])
                    await asyncio.sleep(0.03)
                assert served.events.of(AgentWasLost) == []
                assert heard[-1] > 10
                lost = asyncio.create_task(served.events.next(AgentWasLost))
                for sequence in range(41, 400):
                    forged.send(sequence, 10**6)
                    await asyncio.sleep(0.01)
                    if lost.done():
                        break
                assert lost.done()
            finally:
                for each in (real, forged):
                    each.close()

    run(test())


async def dial_as_guard(served: Served, process: str) -> tuple[Channel[ToAgent], socket.socket, bytes]:
    """A guard's connection: the agent's end, the guard's copy of it, and the bytes that it would send."""
    address = served.coordinator.address
    channel = await connect(address.host, address.port, TOKEN, None, TO_AGENT)
    channel.send(GuardHello("b", process, PROTOCOL_VERSION))
    descriptor, data = channel.hand_over(AgentDied())
    return channel, socket.socket(fileno=os.dup(descriptor)), data


def test_the_death_of_an_agent_that_its_guard_reports_counts_at_once() -> None:
    async def test() -> None:
        async with serving(budget_s=30.0) as served:
            agent = await served.dial()
            await agent.hear(Spawn)
            channel, sock, data = await dial_as_guard(served, process="p")
            lost = asyncio.create_task(served.events.next(AgentWasLost))
            agent.channel.abort()
            channel.abort()  # the agent's end, with its process; the connection is open in the guard
            with sock:
                sock.setblocking(True)
                sock.sendall(data)
                assert "its guard has killed its workers" in (await asyncio.wait_for(lost, DEADLINE_S)).reason

    run(test())


def test_an_agent_whose_standard_input_has_ended_reports_its_own_end_at_once() -> None:
    """The process that had started it is gone: an actor of Ray, a client of ssh."""

    async def test() -> None:
        async with serving(budget_s=30.0, command=("sleep", "100")) as served:
            agent = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "farandole", "agent", "--join", str(served.coordinator.address)),
                *("--host", "b", "--token-file", "-", "--quiet"),
                stdin=asyncio.subprocess.PIPE,
            )
            assert agent.stdin is not None
            agent.stdin.write(TOKEN + b"\n")
            async with asyncio.timeout(DEADLINE_S):
                while not any(each.name() == "sleep" for each in psutil.Process(agent.pid).children()):
                    await asyncio.sleep(0.02)
            lost = asyncio.create_task(served.events.next(AgentWasLost))
            await asyncio.sleep(0)
            agent.stdin.close()
            assert "its guard has killed its workers" in (await asyncio.wait_for(lost, DEADLINE_S)).reason
            await agent.wait()

    run(test())


@pytest.mark.parametrize("how", ["an older process", "without a message", "a forged message"])
def test_a_guard_s_connection_says_nothing_about_a_living_agent(how: str) -> None:
    async def test() -> None:
        async with serving(budget_s=30.0) as served:
            agent = await served.dial()
            await agent.hear(Spawn)
            channel, sock, data = await dial_as_guard(served, process="o" if how == "an older process" else "p")
            channel.abort()
            with sock:
                sock.setblocking(True)
                if how == "an older process":
                    sock.sendall(data)
                elif how == "a forged message":
                    sock.sendall(data[:-1] + bytes([data[-1] ^ 1]))
            await asyncio.sleep(0.2)
            assert served.events.of(AgentWasLost) == []
            agent.channel.send(Heartbeat(1, 0))
            await agent.hear(CoordinatorHeartbeat)

    run(test())


def test_an_agent_with_other_versions_is_refused_with_both() -> None:
    async def test() -> None:
        async with serving() as served:
            address = served.coordinator.address
            channel = await connect(address.host, address.port, TOKEN, None, TO_AGENT)
            channel.send(AgentHello("b", "b", 1, PROTOCOL_VERSION, is_apart=True, software={"torch": "1.0"}))
            refused = await asyncio.wait_for(channel.receive(), DEADLINE_S)
            channel.abort()
            assert isinstance(refused, Refused)
            assert refused.is_final
            assert refused.reason.startswith("it has torch 1.0, and this job runs with torch 2.")

    run(test())


def test_agents_may_come_by_any_of_several_addresses() -> None:
    async def test() -> None:
        async with serving(budget_s=0.3) as served:
            await served.coordinator.listen(["127.0.0.2", "127.0.0.3"])
            addresses = served.coordinator.addresses
            assert [each.host for each in addresses] == ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
            assert len({each.port for each in addresses}) == 1
            channel = await connect("127.0.0.3", addresses[2].port, TOKEN, None, TO_AGENT)
            channel.send(AgentHello("b", "b", 1, PROTOCOL_VERSION, process="p", is_apart=True))
            agent = Apart(channel)
            served.agents.append(agent)
            welcome = await agent.hear(Welcome)
            acknowledged: list[int] = []
            datagrams = HeartbeatSocket(TOKEN, welcome.heartbeat_id, lambda number, _: acknowledged.append(number))
            await datagrams.open(Address("127.0.0.3", welcome.heartbeat_port))
            while not acknowledged:
                datagrams.send(1, 0)
                await asyncio.sleep(0.01)
            datagrams.close()

    run(test())


def test_nonsense_at_the_port_for_datagrams_harms_nobody() -> None:
    async def test() -> None:
        async with serving(budget_s=0.3) as served:
            welcome = await (await served.dial()).hear(Welcome)
            loop = asyncio.get_running_loop()
            transport, _ = await loop.create_datagram_endpoint(
                asyncio.DatagramProtocol, remote_addr=("127.0.0.1", welcome.heartbeat_port)
            )
            seal = HeartbeatSeal(new_token(), welcome.heartbeat_id, Role.DIALER)
            for data in (b"", b"x" * 70, welcome.heartbeat_id, seal.seal(1, 1), bytes(48)):
                transport.sendto(data)
            transport.close()
            assert await served.events.next(AgentWasLost)

    run(test())


def test_the_name_of_a_living_agent_is_taken_but_its_own_process_may_dial_again() -> None:
    async def test() -> None:
        async with serving() as served:
            await (await served.dial("first")).hear(Welcome)
            refused = await (await served.dial("second")).hear(Refused)
            assert (refused.reason, refused.is_final) == ("host b already has an agent", False)
            assert served.events.of(AgentWasLost) == []
            joined = asyncio.ensure_future(served.events.next(AgentJoined))
            await (await served.dial("first")).hear(Welcome)
            assert (await joined).agent == "b"
            assert served.events.of(AgentWasLost)[0].reason == "it connected again"

    run(test())


def test_a_job_that_takes_no_agents_and_an_agent_without_slots_are_told() -> None:
    async def test() -> None:
        async with serving(takes_agents=False) as served:
            refused = await (await served.dial()).hear(Refused)
            assert refused.is_final
            assert "does not accept agents of other machines" in refused.reason
        async with serving() as served:
            for slots in (0, -1, 10**9):
                refused = await (await served.dial(slots=slots)).hear(Refused)
                assert f"offers {slots} slots, an agent may offer 1 to 4096" in refused.reason
                assert refused.is_final

    run(test())
