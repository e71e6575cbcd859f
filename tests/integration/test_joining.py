"""An agent of another machine, as its coordinator sees it: how it joins, and what it does when nobody answers. The
coordinator's end is held by the test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeVar, cast

import pytest

from farandole.base.events.host_events import AgentRejoins, AgentServes, AgentWaits
from farandole.base.liveness.heartbeats import HEARTBEAT_ID_BYTES, HeartbeatSeal
from farandole.base.membership import Address
from farandole.base.wire.authentication import ListenerHandshake, Purpose, Role, new_token
from farandole.base.wire.channel import Channel, accept
from farandole.base.wire.frames import AGENT_MESSAGES, LENGTH
from farandole.base.wire.message import Message
from farandole.base.wire.messages import (
    AgentHello,
    AgentLeaving,
    AgentMessage,
    CoordinatorHeartbeat,
    Dismissed,
    Handled,
    Heartbeat,
    JobOver,
    Refused,
    Resumed,
    Resumption,
    Spawn,
    Welcome,
    WorkerExited,
    WorkerPrinted,
    WorkerSilent,
)
from farandole.errors import AuthenticationError, ConfigError, ProtocolError
from farandole.job.agent.agent import EndOfService, Service
from farandole.job.agent.remote_agent import CannotJoin, JoiningAgent, JoinOptions
from tests.support.jobs import processes_with
from tests.support.listening import listening
from tests.support.waiting import DEADLINE_S, EventLog, run

TOKEN = new_token()
SLEEPER = "import os, time; print('up', os.getcwd(), flush=True); time.sleep(60)"

MessageT = TypeVar("MessageT", bound=Message)


class Served:
    """A joining agent, and the coordinator's end of its connections."""

    def __init__(self, folder: Path, budget_s: float) -> None:
        self.folder, self.budget_s = folder, budget_s
        self.events = EventLog()
        self.job_id, self.has_refused = "job", asyncio.Event()
        self.connections: asyncio.Queue[Channel[AgentMessage]] = asyncio.Queue()
        self.channels: list[Channel[AgentMessage]] = []
        self.channel: Channel[AgentMessage]
        self.agent: JoiningAgent
        self.service: asyncio.Task[Service]

    async def on_connection(self, connected: socket.socket) -> None:
        try:
            self.channels.append(await accept(connected, TOKEN, self.job_id, AGENT_MESSAGES))
            self.connections.put_nowait(self.channels[-1])
        except ConnectionError:
            pass
        except AuthenticationError:
            self.has_refused.set()

    async def greet(self, **more: object) -> AgentHello:
        """Welcome the agent that dials next."""
        hello = await self.meet()
        welcome = Welcome(
            job_id="job",
            command=(sys.executable, "-c", SLEEPER),
            folder=str(self.folder),
            environment={"TEST_FOLDER": str(self.folder)},
            detection_budget_s=self.budget_s,
            grace_s=0.2,
            is_elastic=True,
        )
        self.channel.send(Welcome(**{**{name: getattr(welcome, name) for name in Welcome.__struct_fields__}, **more}))
        return hello

    async def meet(self) -> AgentHello:
        """Meet the agent that dials next; connections for guards are left alone."""
        while True:
            self.channel = await asyncio.wait_for(self.connections.get(), DEADLINE_S)
            with contextlib.suppress(ProtocolError):  # of a GuardHello
                return await self.hear(AgentHello)

    async def hear(self, kind: type[MessageT]) -> MessageT:
        """The next message of this kind; others are passed over."""
        while True:
            message = await asyncio.wait_for(self.channel.receive(), DEADLINE_S)
            if isinstance(message, kind):
                return message

    async def answer_until(self, kind: type[MessageT], acknowledges: bool = True) -> MessageT:
        """The same, while each heartbeat is answered."""
        while True:
            message = await asyncio.wait_for(self.channel.receive(), DEADLINE_S)
            if isinstance(message, Handled):
                continue
            if isinstance(message, Heartbeat):
                self.channel.send(CoordinatorHeartbeat(message.sequence, message.sequence if acknowledges else 0))
            if isinstance(message, kind):
                return message

    async def spawn(self, worker: str) -> WorkerPrinted:
        """Start a worker; its first line."""
        self.channel.send(Spawn(worker, 0))
        return await self.answer_until(WorkerPrinted)


@contextlib.asynccontextmanager
async def joining(folder: Path, *, budget_s: float = 3.0, retry_s: float = 20.0) -> AsyncIterator[Served]:
    served = Served(folder, budget_s)
    server = listening(served.on_connection)
    coordinator = server.addresses[0]
    served.agent = JoiningAgent(JoinOptions((coordinator,), TOKEN, "b", 2, retry_s), served.events)
    served.service = asyncio.create_task(served.agent.run())
    before = os.getcwd()
    try:
        yield served
    finally:
        served.service.cancel()
        await asyncio.wait([served.service], timeout=DEADLINE_S)
        server.close()
        for channel in served.channels:
            channel.abort()
        await asyncio.sleep(0)  # for their ends to be told
        os.chdir(before)
        assert processes_with(str(folder)) == []


def test_a_joiner_hears_what_to_run_and_where_and_its_workers_lines_are_forwarded(tmp_path: Path) -> None:
    async def test() -> None:
        async with joining(tmp_path) as served:
            hello = await served.greet()
            assert (hello.agent, hello.host, hello.slots, hello.is_apart) == ("b", "b", 2, True)
            said = await served.spawn("w1")
            assert (said.worker, said.stream, said.lines) == ("w1", "stdout", (f"up {tmp_path}".encode(),))
            served.channel.send(JobOver(3, "a test"))
            await served.hear(WorkerSilent)
            assert await served.service == Service(EndOfService.JOB_ENDED, "a test", 3)
            assert served.events.of(AgentServes) == [AgentServes("job", 2)]

    run(test())


def test_an_agent_whose_beats_nobody_answers_kills_its_workers_in_time_and_joins_again_empty(tmp_path: Path) -> None:
    async def test() -> None:
        async with joining(tmp_path, budget_s=0.6) as served:
            begin_s = asyncio.get_running_loop().time()
            first = await served.greet()
            await served.spawn("w1")
            # One way only: everything that the agent says arrives, and nothing comes back.
            with pytest.raises(ConnectionError):
                assert not await served.hear(WorkerExited), "the lease's end is no fault of the worker's"
            assert 0.3 < asyncio.get_running_loop().time() - begin_s < 2.0
            again = await served.greet()
            assert again.process == first.process
            assert processes_with(str(tmp_path)) == []
            assert await served.spawn("w2")
            (rejoins,) = served.events.of(AgentRejoins)
            assert "has not answered" in rejoins.reason

    run(test())


def test_an_agent_that_waits_for_its_coordinator_is_not_served_by_that_of_another_job(tmp_path: Path) -> None:
    """A token file may be that of several jobs, and another one may have got the port."""

    async def test() -> None:
        async with joining(tmp_path) as served:
            await served.greet(patience_s=DEADLINE_S)
            await served.spawn("w1")
            served.job_id = "another"
            served.channel.abort()
            await served.has_refused.wait()
            served.job_id = "job"
            hello = await served.meet()
            assert hello.resumes == Resumption(1, 1)
            served.channel.send(Resumed(2, 0, b"", 0, 0))
            served.channel.send(JobOver(0, "a test"))
            assert (await served.hear(WorkerExited)).worker == "w1", "it has run until now"
            assert (await served.service).end is EndOfService.JOB_ENDED

    run(test())


def test_beats_that_acknowledge_nothing_do_not_keep_a_lease(tmp_path: Path) -> None:
    async def test() -> None:
        async with joining(tmp_path, budget_s=0.5) as served:
            await served.greet()
            served.channel.send(Spawn("w1", 0))
            with pytest.raises(ConnectionError):
                await served.answer_until(WorkerExited, acknowledges=False)
            await served.greet()

    run(test())


def test_a_coordinator_that_goes_in_the_middle_of_the_proof_is_asked_again_and_a_wrong_token_is_told() -> None:
    async def test() -> None:
        times = 0

        async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal times
            times += 1
            handshake = ListenerHandshake(Purpose.CONTROL)
            while handshake.subject is None:
                handshake.feed(await reader.read(handshake.missing))
            writer.write(handshake.challenge(TOKEN, b"job"))
            await reader.readexactly(LENGTH.unpack(await reader.readexactly(LENGTH.size))[0])
            writer.transport.abort()

        server, events = await asyncio.start_server(hang_up, "127.0.0.1", 0), EventLog()
        options = JoinOptions((Address(*server.sockets[0].getsockname()),), TOKEN, "b", 1, 20.0)
        with pytest.raises(ConfigError, match="does not accept the token"):
            await JoiningAgent(options, events).run()
        assert times == 2
        (waits,) = events.of(AgentWaits)
        assert "closed the connection after this agent had proved the token" in waits.why
        server.close()

    run(test())


def test_datagrams_alone_keep_a_lease(tmp_path: Path) -> None:
    heartbeat_id = b"b" * HEARTBEAT_ID_BYTES
    seal = HeartbeatSeal(TOKEN, heartbeat_id, Role.LISTENER)

    class Answering(asyncio.DatagramProtocol):
        count = 0

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = cast(asyncio.DatagramTransport, transport)

        def datagram_received(self, data: bytes, addr: object) -> None:
            heartbeat = seal.open(data)
            assert heartbeat is not None
            Answering.count += 1
            self.transport.sendto(seal.seal(heartbeat[0], heartbeat[0]), addr)  # type: ignore[arg-type]

    async def test() -> None:
        async with joining(tmp_path, budget_s=0.3) as served:
            loop = asyncio.get_running_loop()
            transport, _ = await loop.create_datagram_endpoint(Answering, local_addr=("127.0.0.1", 0))
            try:
                await served.greet(heartbeat_id=heartbeat_id, heartbeat_port=transport.get_extra_info("sockname")[1])
                served.channel.send(Spawn("w1", 0))
                while Answering.count < 40:  # four budgets
                    assert not isinstance(await served.channel.receive(), WorkerExited)
                assert served.events.of(AgentRejoins) == []
            finally:
                transport.close()

    run(test())


def test_an_agent_that_is_asked_to_end_says_so_and_goes_when_it_is_dismissed(tmp_path: Path) -> None:
    async def test() -> None:
        async with joining(tmp_path) as served:
            await served.greet()
            while not served.events.of(AgentServes):
                await asyncio.sleep(0.001)
            served.agent.leave("SIGTERM was received")
            assert (await served.hear(AgentLeaving)).reason == "SIGTERM was received"
            served.channel.send(Dismissed("host b is drained", is_drained=True))
            assert (await served.service).exit_code == 0

    run(test())


def test_workers_that_do_not_leave_within_the_grace_are_killed(tmp_path: Path) -> None:
    async def test() -> None:
        async with joining(tmp_path) as served:
            await served.greet()
            await served.spawn("w1")
            served.agent.leave("a test")
            assert (await served.answer_until(WorkerExited)).exit_code == -9

    run(test())


@pytest.mark.parametrize("is_final", [True, False])
def test_a_refusal_is_told_and_only_a_final_one_ends_the_attempts(tmp_path: Path, is_final: bool) -> None:
    async def test() -> None:
        async with joining(tmp_path) as served:
            channel = await asyncio.wait_for(served.connections.get(), DEADLINE_S)
            waits = asyncio.create_task(served.events.next(AgentWaits)) if not is_final else None
            await asyncio.wait_for(channel.receive(), DEADLINE_S)
            channel.send(Refused("host b already has an agent", is_final))
            if waits is None:
                with pytest.raises(ConfigError, match="refuses this agent: host b already has an agent"):
                    await served.service
            else:
                assert "host b already has an agent; trying again for 20 s" in (await waits).line()
                await served.greet()
            channel.abort()

    run(test())


def test_a_folder_that_is_not_here_is_refused_with_what_to_do(tmp_path: Path) -> None:
    async def test() -> None:
        async with joining(tmp_path) as served:
            await served.greet(folder=str(tmp_path / "elsewhere"))
            with pytest.raises(
                ConfigError, match=r"elsewhere, which cannot be entered on this machine .* with --folder"
            ):
                await served.service

    run(test())


def test_nobody_there_is_said_at_once_and_ends_the_attempts_in_time(tmp_path: Path) -> None:
    async def test() -> None:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        address = Address(*server.sockets[0].getsockname())
        server.close()
        events = EventLog()
        agent = JoiningAgent(JoinOptions((address,), TOKEN, "b", 1, retry_s=1.0), events)
        with pytest.raises(CannotJoin, match=f"no process listens at {address} \\(tried for 1 s"):
            await agent.run()
        assert len(events.of(AgentWaits)) == 1

    run(test())
