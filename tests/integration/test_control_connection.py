"""Commands on the coordinator's port: the same proof as an agent's, and words of their own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from farandole.base.config import JobConfig
from farandole.base.events.host_events import HostUndrained
from farandole.base.events.job_events import ConnectionRefused
from farandole.base.wire.authentication import new_token
from farandole.base.wire.channel import Channel, connect
from farandole.base.wire.control import (
    AskScale,
    AskStatus,
    ClientHello,
    Declined,
    EventRecord,
    Status,
    Subscribe,
    ToClient,
)
from farandole.base.wire.frames import TO_CLIENT
from farandole.base.wire.message import PROTOCOL_VERSION, Message
from farandole.base.wire.messages import AgentHello, Heartbeat
from farandole.errors import AuthenticationError
from farandole.job.coordinator.command_server import EVENTS_KEPT
from farandole.job.coordinator.server import Coordinator, CoordinatorSetup
from farandole.job.launch import control_client
from farandole.job.launch.control_client import Client, NoAnswer
from tests.support.waiting import DEADLINE_S, EventLog, run

TOKEN = new_token()


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[Coordinator, EventLog]]:
    events = EventLog()
    coordinator = Coordinator(CoordinatorSetup(JobConfig(num_proc=1), TOKEN, "job"), on_event=events)
    await coordinator.start()
    outcome = asyncio.create_task(coordinator.run())
    try:
        yield coordinator, events
    finally:
        outcome.cancel()
        await asyncio.wait([outcome], timeout=DEADLINE_S)


async def refused(events: EventLog) -> ConnectionRefused:
    known = events.of(ConnectionRefused)
    return known[0] if known else await events.next(ConnectionRefused)


def test_a_command_is_answered_one_request_after_the_other() -> None:
    async def body() -> None:
        async with serving() as (coordinator, _):
            client = await Client.dial(coordinator.address, TOKEN, "job")
            assert (await client.status()).state == "starting"
            assert isinstance(await client.ask(AskScale(1)), Declined)
            assert (await client.status()).job == "job"
            client.close()

    run(body())


@pytest.mark.parametrize(
    ("token", "job"), [(new_token(), "job"), (TOKEN, "another")], ids=["another token", "another job"]
)
def test_who_does_not_know_the_token_is_told_nothing(token: bytes, job: str) -> None:
    async def body() -> None:
        async with serving() as (coordinator, events):
            with pytest.raises((NoAnswer, AuthenticationError)):
                await Client.dial(coordinator.address, token, job)
            assert (await refused(events)).who

    run(body())


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ([AskStatus()], "AskStatus before AgentHello"),
        ([ClientHello(), ClientHello()], "sent ClientHello twice"),
        ([ClientHello(), Heartbeat(1)], "not a valid message"),
        ([AgentHello("a", "host", 1, PROTOCOL_VERSION), AskStatus()], "not a valid message"),
    ],
)
def test_who_says_what_it_must_not_say_is_hung_up_on(said: list[Message], reason: str) -> None:
    async def body() -> None:
        async with serving() as (coordinator, events):
            address = coordinator.address
            channel = await connect(address.host, address.port, TOKEN, "job", TO_CLIENT)
            for message in said:
                channel.send(message)
            assert reason in (await refused(events)).reason
            channel.abort()

    run(body())


def test_a_command_that_waits_when_the_job_ends_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_client, "_RETURN_S", 0.3)  # there is no next coordinator to wait for

    async def body() -> None:
        async with serving() as (coordinator, _):
            client = await Client.dial(coordinator.address, TOKEN, "job")
            await client.status()
            waiting = asyncio.create_task(client.wait_until(lambda status: False, DEADLINE_S))
            coordinator.request_stop(now=True, reason="Stopped by a test.")
            with pytest.raises(NoAnswer, match="the job has ended"):
                await waiting
            client.close()

    run(body())


def test_who_waits_in_vain_is_told_so_and_the_job_goes_on() -> None:
    async def body() -> None:
        async with serving() as (coordinator, _):
            client = await Client.dial(coordinator.address, TOKEN, "job")
            with pytest.raises(NoAnswer, match="not completed after 0 s"):
                await client.wait_until(lambda status: False, 0.0)
            assert not coordinator.has_ended
            client.close()

    run(body())


async def events_of(client: Channel[ToClient], number: int) -> list[EventRecord]:
    found: list[EventRecord] = []
    while len(found) < number:
        message = await client.receive()
        assert isinstance(message, EventRecord)
        found.append(message)
    return found


def test_a_subscriber_gets_the_kept_events_then_each_new_one_and_answers_in_between() -> None:
    async def body() -> None:
        async with serving() as (coordinator, _):
            for number in range(EVENTS_KEPT + 5):
                coordinator.remember(HostUndrained(f"host{number}"))
            address = coordinator.address
            channels = [await connect(address.host, address.port, TOKEN, "job", TO_CLIENT) for _ in range(2)]
            for channel in channels:
                channel.send(ClientHello())
            first, second = channels
            first.send(Subscribe())
            kept = await events_of(first, EVENTS_KEPT)
            assert [each.number for each in kept] == list(range(6, EVENTS_KEPT + 6))
            assert kept[0].fields == {"event": "HostUndrained", "host": "host5"}
            second.send(Subscribe(epoch=1, after=kept[-3].number))
            assert [each.number for each in await events_of(second, 2)] == [EVENTS_KEPT + 4, EVENTS_KEPT + 5]
            coordinator.remember(HostUndrained("x" * 20_000))
            for channel in channels:
                (new,) = await events_of(channel, 1)
                assert (new.number, new.epoch, new.level) == (EVENTS_KEPT + 6, 1, "info")
                assert len(str(new.fields["host"])) < 10_000
            second.send(AskStatus())
            status = await second.receive()
            assert isinstance(status, Status)
            assert [each.line for each in status.events][-2] == f"host host{EVENTS_KEPT + 4} may be used again"
            second.abort()
            coordinator.remember(HostUndrained("last"))
            assert (await events_of(first, 1))[0].fields["host"] == "last"
            third = await connect(address.host, address.port, TOKEN, "job", TO_CLIENT)
            third.send(ClientHello())
            third.send(Subscribe(epoch=2, after=EVENTS_KEPT))  # of another coordinator: all are new
            assert len(await events_of(third, EVENTS_KEPT)) == EVENTS_KEPT
            for channel in (first, third):
                channel.close()

    run(body())
