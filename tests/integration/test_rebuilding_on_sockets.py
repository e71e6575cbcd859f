"""A coordinator without a former state asks the agents, on real sockets: who is believed, and who is turned away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from farandole.base.config import JobConfig
from farandole.base.events.host_events import JobRebuilt
from farandole.base.events.job_events import ConnectionRefused
from farandole.base.membership import DataAddress, GenerationId
from farandole.base.wire.authentication import new_token
from farandole.base.wire.channel import Channel, connect
from farandole.base.wire.frames import TO_AGENT
from farandole.base.wire.message import PROTOCOL_VERSION
from farandole.base.wire.messages import (
    AgentHello,
    Resumed,
    Resumption,
    SessionOver,
    TellWorkers,
    ToAgent,
    ToldWorker,
    Welcome,
    WorkersTold,
)
from farandole.errors import AuthenticationError
from farandole.job.coordinator import rebuilding
from farandole.job.coordinator.job import new_job
from farandole.job.coordinator.journal import CoordinatorState
from farandole.job.coordinator.server import Coordinator, CoordinatorSetup
from farandole.job.coordinator.transition import Outcome
from tests.support.waiting import DEADLINE_S, EventLog, run

TOKEN, JOB_ID, EPOCH = new_token(), "job", 3_000_000
CONFIG = JobConfig(num_proc=2, grace_s=0.0, takes_agents=True)
WELCOME = Welcome(JOB_ID, ("true",), "/", {}, 3.0, 0.0, False, patience_s=100.0)
CHANNELS: list[Channel[ToAgent]] = []
WORKERS = tuple(
    ToldWorker(
        f"w{rank}",
        rank,
        address=DataAddress("127.0.0.1", 20000 + rank),
        is_elastic=True,
        generation=GenerationId(1, 1, 7, "job-7"),
        rank=rank,
        size=2,
        announced=7,
        ready=7,
        synced=7,
    )
    for rank in range(2)
)


@contextlib.asynccontextmanager
async def asking(
    monkeypatch: pytest.MonkeyPatch, telling_s: float = 60.0
) -> AsyncIterator[tuple[Coordinator, EventLog, asyncio.Task[Outcome]]]:
    """A coordinator that knows nothing."""
    monkeypatch.setattr(rebuilding, "TELLING_S", telling_s)
    job, events = new_job(CONFIG, JOB_ID, EPOCH - 1), EventLog()
    nothing = CoordinatorState(job, 0.0, 0, {}, {}, {}, frozenset(), (), lost="a test")
    coordinator = Coordinator(
        CoordinatorSetup(CONFIG, TOKEN, JOB_ID, welcome=WELCOME),
        on_event=events,
        restored=nothing,
        journal=lambda _: None,
    )
    await coordinator.start()
    serving = asyncio.create_task(coordinator.run())
    await asyncio.sleep(0)
    try:
        yield coordinator, events, serving
    finally:
        while CHANNELS:
            CHANNELS.pop().abort()
        serving.cancel()
        await asyncio.wait([serving], timeout=DEADLINE_S)


async def meet(
    coordinator: Coordinator, epoch: int = 1, agent: str = "a", token: bytes = TOKEN, handled: int = 12
) -> Channel[ToAgent]:
    channel = await connect("127.0.0.1", coordinator.address.port, token, None, TO_AGENT)
    CHANNELS.append(channel)
    resumes = Resumption(epoch, handled)
    channel.send(AgentHello(agent, agent, 2, PROTOCOL_VERSION, process="p", is_apart=True, resumes=resumes))
    return channel


async def why_refused(events: EventLog) -> str:
    """The reason why a connection was refused, before or after this call."""
    found = events.of(ConnectionRefused) or [await events.next(ConnectionRefused)]
    return found[0].reason


async def receive(channel: Channel[ToAgent]) -> ToAgent:
    async with asyncio.timeout(DEADLINE_S):
        return await channel.receive()


def test_an_agent_tells_its_workers_and_its_session_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with asking(monkeypatch, telling_s=0.3) as (coordinator, events, _):
            channel = await meet(coordinator)
            assert await receive(channel) == TellWorkers(EPOCH)
            channel.send(WorkersTold(JOB_ID, WORKERS, 7))
            resumed = await receive(channel)
            assert isinstance(resumed, Resumed)
            assert (resumed.epoch, resumed.handled) == (EPOCH, 0)
            assert (await events.next(JobRebuilt)).missing == 0
            assert coordinator.clients.status().generation == 7

    run(body())


def test_an_agent_whose_connection_ended_before_it_was_answered_tells_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with asking(monkeypatch) as (coordinator, _, _serving):
            channel = await meet(coordinator)
            await receive(channel)
            channel.send(WorkersTold(JOB_ID, WORKERS, 7))
            await receive(channel)
            channel.abort()
            again = await meet(coordinator)  # of epoch 1 still: the answer was lost
            assert isinstance(await receive(again), TellWorkers)
            again.send(WorkersTold(JOB_ID, WORKERS, 7))
            assert isinstance(await receive(again), Resumed)
            again.abort()
            assert isinstance(await receive(await meet(coordinator, EPOCH, handled=0)), Resumed)

    run(body())


def test_an_agent_that_comes_too_late_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with asking(monkeypatch, telling_s=0.2) as (coordinator, events, _):
            channel = await meet(coordinator)
            await receive(channel)
            channel.send(WorkersTold(JOB_ID, WORKERS, 7))
            await events.next(JobRebuilt)
            late = await meet(coordinator, agent="b")
            assert isinstance(await receive(late), SessionOver)

    run(body())


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        (WorkersTold("another", WORKERS, 7), "it serves job another, and this is job job"),
        (WorkersTold(JOB_ID, (WORKERS[0], WORKERS[0]), 7), "'w0', which is no name of a worker"),
    ],
)
def test_an_agent_that_cannot_be_of_this_job_is_turned_away(
    monkeypatch: pytest.MonkeyPatch, told: WorkersTold, problem: str
) -> None:
    """Of another job with the same token file, for example."""

    async def body() -> None:
        async with asking(monkeypatch) as (coordinator, events, _):
            channel = await meet(coordinator)
            await receive(channel)
            channel.send(told)
            over = await receive(channel)
            assert isinstance(over, SessionOver)
            assert problem in over.reason
            assert problem in await why_refused(events)

    run(body())


def test_an_agent_of_a_newer_coordinator_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with asking(monkeypatch) as (coordinator, events, _):
            channel = await meet(coordinator, epoch=EPOCH + 1)
            with pytest.raises(ConnectionError):
                await receive(channel)
            why = await why_refused(events)
            assert f"serves a coordinator of epoch {EPOCH + 1}, which has replaced this one" in why

    run(body())


def test_nobody_without_the_token_tells_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with asking(monkeypatch) as (coordinator, events, _):
            with pytest.raises((ConnectionError, AuthenticationError)):
                await receive(await meet(coordinator, token=new_token()))
            assert "did not prove the token" in await why_refused(events)

    run(body())


def test_ctrl_c_ends_the_job_that_is_not_known_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with asking(monkeypatch) as (coordinator, _, serving):
            coordinator.request_stop(False, "SIGINT was received")
            async with asyncio.timeout(DEADLINE_S):
                assert (await serving).exit_code != 0

    run(body())
