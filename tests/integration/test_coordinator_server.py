"""The coordinator's shell on real sockets: who is let in, who is given up, and how a job ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from typing import TypeVar

import pytest

from farandole.base.config import JobConfig
from farandole.base.events.host_events import AgentJoined, AgentWasLost
from farandole.base.events.job_events import ConnectionRefused, CoordinatorStalled
from farandole.base.machine import now_s
from farandole.base.wire import channel
from farandole.base.wire.authentication import new_token
from farandole.base.wire.channel import Channel, connect
from farandole.base.wire.frames import TO_AGENT, frame
from farandole.base.wire.link_messages import Ready
from farandole.base.wire.listening import Strangers
from farandole.base.wire.message import PROTOCOL_VERSION, Message
from farandole.base.wire.messages import AgentHello, FromWorker, Heartbeat, JobOver, Spawn, ToAgent, WorkerExited
from farandole.errors import ConfigError
from farandole.job.coordinator.server import Coordinator, CoordinatorSetup
from farandole.job.coordinator.transition import Outcome
from tests.support.waiting import DEADLINE_S, EventLog, run

TOKEN = new_token()
JOB_ID = "job"

MessageT = TypeVar("MessageT", bound=Message)


class Running:
    """A coordinator that serves, its events, and agents' ends of connections to it."""

    def __init__(self, coordinator: Coordinator, events: EventLog) -> None:
        self.coordinator, self.events = coordinator, events
        self.outcome: asyncio.Task[Outcome] = asyncio.create_task(coordinator.run())
        self._channels: list[Channel[ToAgent]] = []

    async def close(self) -> None:
        for each in self._channels:
            each.abort()
        self.outcome.cancel()
        await asyncio.wait([self.outcome], timeout=DEADLINE_S)

    async def dial(self, token: bytes = TOKEN, job_id: str = JOB_ID) -> Channel[ToAgent]:
        address = self.coordinator.address
        channel = await connect(address.host, address.port, token, job_id, TO_AGENT)
        self._channels.append(channel)
        return channel

    async def join(self, agent: str = "a", slots: int = 1) -> Channel[ToAgent]:
        channel = await self.dial()
        channel.send(AgentHello(agent, "host", slots, PROTOCOL_VERSION))
        return channel

    async def dial_raw(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address = self.coordinator.address
        return await asyncio.open_connection(address.host, address.port)


@contextlib.asynccontextmanager
async def serving(
    config: JobConfig | None = None, clock_offset_s: list[float] | None = None, has_journal: bool = False
) -> AsyncIterator[Running]:
    events = EventLog()
    offset_s = clock_offset_s or [0.0]
    coordinator = Coordinator(
        CoordinatorSetup(config or JobConfig(num_proc=1), TOKEN, JOB_ID),
        on_event=events,
        clock=lambda: now_s() + offset_s[0],
        journal=(lambda _: None) if has_journal else None,
    )
    await coordinator.start()
    running = Running(coordinator, events)
    try:
        yield running
    finally:
        await running.close()


async def receive(channel: Channel[ToAgent], kind: type[MessageT]) -> MessageT:
    """The next message, which has to be of this kind."""
    message = await asyncio.wait_for(channel.receive(), DEADLINE_S)
    assert isinstance(message, kind), message
    return message


async def hear_out(channel: Channel[ToAgent]) -> None:
    """Receive until there is an error."""
    while True:
        await asyncio.wait_for(channel.receive(), DEADLINE_S)


async def assert_job_is_unharmed(running: Running) -> None:
    """An agent that knows the token is served as if nothing had happened."""
    await receive(await running.join(), Spawn)


def test_an_agent_that_proves_the_token_gets_workers_to_spawn() -> None:
    async def test() -> None:
        async with serving(JobConfig(num_proc=2)) as running:
            channel = await running.join(slots=2)
            assert {(await receive(channel, Spawn)).slot for _ in range(2)} == {0, 1}

    run(test())


@pytest.mark.parametrize(
    ("token", "job_id"), [(new_token(), JOB_ID), (TOKEN, "another job")], ids=["another token", "another job"]
)
def test_a_wrong_token_is_refused_with_one_event(token: bytes, job_id: str) -> None:
    async def test() -> None:
        async with serving() as running:
            with pytest.raises(ConnectionError, match="closed the connection"):
                await running.dial(token, job_id)
            await assert_job_is_unharmed(running)
            (refused,) = running.events.of(ConnectionRefused)
            assert "did not prove the token" in refused.reason

    run(test())


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(os.urandom(1000), id="random bytes"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="a web browser"),
        pytest.param(b"\xff\xff\xff\xff", id="an oversized frame"),
        pytest.param(frame(b""), id="an empty frame"),
        pytest.param(frame(b"x" * 100), id="a small frame of nonsense"),
        pytest.param(frame(b"x" * 100)[:50], id="half a frame"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_a_stranger_is_refused_with_one_event(said: bytes) -> None:
    async def test() -> None:
        async with serving() as running:
            refused = asyncio.create_task(running.events.next(ConnectionRefused))
            reader, writer = await running.dial_raw()
            writer.write(said)
            writer.write_eof()
            await refused
            with contextlib.suppress(ConnectionError):  # a reset, when the coordinator left bytes unread
                await asyncio.wait_for(reader.read(), DEADLINE_S)
            writer.close()
            await assert_job_is_unharmed(running)
            assert len(running.events.of(ConnectionRefused)) == 1

    run(test())


def test_who_takes_too_long_to_prove_the_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "HANDSHAKE_DEADLINE_S", 0.1)

    async def test() -> None:
        async with serving() as running:
            refused = asyncio.create_task(running.events.next(ConnectionRefused))
            _, writer = await running.dial_raw()
            writer.write(b"\x00")
            assert "no proof of the token within 0.1 s" in (await refused).reason
            writer.close()
            await assert_job_is_unharmed(running)

    run(test())


def test_no_more_than_so_many_strangers_are_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest makes room: whoever keeps connections open does not keep an agent out."""
    monkeypatch.setattr(Strangers.__init__, "__defaults__", (3,))

    async def test() -> None:
        async with serving() as running:
            refused = asyncio.create_task(running.events.next(ConnectionRefused))
            writers = [(await running.dial_raw())[1] for _ in range(4)]
            assert "3 newer connections have not proved the token either" in (await refused).reason
            await assert_job_is_unharmed(running)
            for writer in writers:
                writer.close()

    run(test())


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (Heartbeat(0), "sent Heartbeat before AgentHello"),
        (AgentHello("a", "host", 1, PROTOCOL_VERSION), "sent AgentHello twice"),
    ],
)
def test_an_agent_that_says_what_it_must_not_say_is_hung_up_on(said: Message, reason: str) -> None:
    async def test() -> None:
        async with serving() as running:
            refused = asyncio.create_task(running.events.next(ConnectionRefused))
            channel = await (running.dial() if isinstance(said, Heartbeat) else running.join())
            channel.send(said)
            assert reason in (await refused).reason
            with pytest.raises(ConnectionError):
                await hear_out(channel)

    run(test())


def test_an_agent_that_says_nothing_for_the_budget_is_lost() -> None:
    async def test() -> None:
        async with serving(JobConfig(num_proc=1, detection_budget_s=0.3)) as running:
            joined = asyncio.create_task(running.events.next(AgentJoined))
            lost = asyncio.create_task(running.events.next(AgentWasLost))
            begin_s = now_s()
            await running.join()
            await joined
            assert "nothing was received from it" in (await lost).reason
            assert 0.2 < now_s() - begin_s < 3.0
            assert (await asyncio.wait_for(running.outcome, DEADLINE_S)).exit_code == 1

    run(test())


def test_an_agent_that_dials_again_takes_its_place_without_its_old_workers() -> None:
    async def test() -> None:
        async with serving(JobConfig(num_proc=2, detection_budget_s=60.0)) as running:
            other = await running.join("a")
            await receive(other, Spawn)
            first = await running.join("b")
            old = await receive(first, Spawn)
            first.close()
            second = await running.join("b")
            new = await receive(second, Spawn)
            assert old != new
            assert [event.reason for event in running.events.of(AgentWasLost)] == ["it connected again"]

    run(test())


def test_the_time_in_which_the_coordinator_could_not_run_is_not_held_against_an_agent() -> None:
    async def a_minute(events: EventLog) -> None:
        """Wait until it has noticed that; a busy machine holds it up as well, for less."""
        async with asyncio.timeout(DEADLINE_S):
            while not any(each.stalled_s > 59.0 for each in events.of(CoordinatorStalled)):
                await asyncio.sleep(0.01)

    async def test() -> None:
        offset_s = [0.0]
        async with serving(JobConfig(num_proc=1, detection_budget_s=1.0), offset_s) as running:
            channel = await running.join()
            await receive(channel, Spawn)
            offset_s[0] = 60.0  # what a process sees that was stopped for a minute
            await a_minute(running.events)
            channel.send(FromWorker("w", Ready(1)))
            assert running.events.of(AgentWasLost) == []

    run(test())


def test_a_stop_is_told_to_the_agents_before_the_coordinator_goes() -> None:
    async def test() -> None:
        async with serving() as running:
            channel = await running.join()
            spawn = await receive(channel, Spawn)
            running.coordinator.request_stop(now=False, reason="enough")
            channel.send(WorkerExited(spawn.worker, 0))
            while not isinstance(message := await channel.receive(), JobOver):
                pass
            assert "enough" in message.reason
            channel.close()
            outcome = await asyncio.wait_for(running.outcome, DEADLINE_S)
            assert (outcome.exit_code, outcome.reason) == (message.exit_code, message.reason)

    run(test())


def test_a_port_in_use_is_an_error_that_says_what_to_do() -> None:
    async def test(port: int) -> None:
        coordinator = Coordinator(
            CoordinatorSetup(JobConfig(num_proc=1), TOKEN, JOB_ID, port=port), on_event=EventLog()
        )
        with pytest.raises(ConfigError, match=rf"port {port}.*choose another --port"):
            await coordinator.start()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        run(test(taken.getsockname()[1]))


def test_the_launchers_own_agent_may_be_silent_where_no_other_host_trains() -> None:
    """As while the launcher is stopped in a debugger, and its coordinator is not."""

    async def test() -> None:
        async with serving(JobConfig(num_proc=1, detection_budget_s=0.3), has_journal=True) as running:
            channel = await running.join()
            await receive(channel, Spawn)
            channel.send(Heartbeat(1))
            await asyncio.sleep(1.0)
            assert running.events.of(AgentWasLost) == []

    run(test())
