"""A coordinator takes over from another one, on real sockets: what agents are told again, and who is turned away."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import AsyncIterator
from typing import TypeVar

import pytest
from msgspec.structs import replace

from farandole.base.config import JobConfig
from farandole.base.events.host_events import AgentWasLost
from farandole.base.events.job_events import ConnectionRefused
from farandole.base.membership import Address
from farandole.base.wire.authentication import new_token
from farandole.base.wire.channel import Channel, connect
from farandole.base.wire.frames import TO_AGENT
from farandole.base.wire.message import PROTOCOL_VERSION, Message
from farandole.base.wire.messages import (
    AgentHello,
    CoordinatorHeartbeat,
    Handled,
    JobOver,
    Kill,
    Resumed,
    Resumption,
    SessionOver,
    Spawn,
    ToAgent,
    Welcome,
    WorkerExited,
)
from farandole.job.coordinator import agent_greeting, decision_loop
from farandole.job.coordinator.journal import CoordinatorState
from farandole.job.coordinator.server import Coordinator, CoordinatorSetup
from farandole.job.coordinator.transition import Outcome
from tests.support.waiting import DEADLINE_S, EventLog, run

TOKEN, JOB_ID, PATIENCE_S = new_token(), "job", 100.0
WELCOME = Welcome(JOB_ID, ("true",), "/", {}, 3.0, 0.0, False, patience_s=PATIENCE_S)
CONFIG = JobConfig(num_proc=2, grace_s=0.0, takes_agents=True)

MessageT = TypeVar("MessageT", bound=Message)


class SlowStore:
    """A store that takes its time to open, as one in another process does."""

    address = Address("127.0.0.1", 1)

    async def open(self, *hosts: str) -> None:
        await asyncio.sleep(0.3)

    def admit(self, host: str) -> None: ...

    def clear(self) -> None: ...

    def close(self) -> None: ...


class Epoch:
    """One coordinator, its events, and its journal. `state`: that of the former one. The sessions of `now` are those of
    the coordinator itself."""

    now: CoordinatorState

    def __init__(
        self, state: bytes | None = None, port: int = 0, config: JobConfig = CONFIG, welcome: Welcome = WELCOME
    ) -> None:
        self.events, self.state = EventLog(), state
        self.is_slow, self.writing = False, list[asyncio.Future[None]]()
        self._channels: list[Channel[ToAgent]] = []
        self.coordinator = Coordinator(
            CoordinatorSetup(config, TOKEN, JOB_ID, port=port, welcome=welcome),
            on_event=self.events,
            store=SlowStore(),
            journal=self._write,
            restored=None if state is None else pickle.loads(state),
        )

    def _write(self, state: CoordinatorState) -> asyncio.Future[None] | None:
        """While it `is_slow` the journal has a state only when the future in `writing` is done."""
        self.now, encoded = state, pickle.dumps(state)
        if not self.is_slow:
            self.state = encoded
            return None
        future = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: setattr(self, "state", encoded))
        self.writing.append(future)
        return future

    async def begin_to_write(self) -> None:
        """Wait until a state is being written."""
        async with asyncio.timeout(DEADLINE_S):
            while not self.writing or self.writing[-1].done():
                await asyncio.sleep(0.001)

    def end_writing(self) -> None:
        """Let the journal have it, and each further state at once."""
        self.is_slow = False
        self.writing[-1].set_result(None)

    @contextlib.asynccontextmanager
    async def serves(self) -> AsyncIterator[asyncio.Task[Outcome]]:
        """Serve until the block ends, as after a kill -9: nobody is told anything."""
        await self.coordinator.start()
        serving = asyncio.create_task(self.coordinator.run())
        await asyncio.sleep(0)  # a task that is cancelled before it begins closes nothing
        try:
            yield serving
        finally:
            for each in self._channels:
                each.abort()
            serving.cancel()
            await asyncio.wait([serving], timeout=DEADLINE_S)

    def next(self) -> Epoch:
        return Epoch(self.state, self.coordinator.address.port)

    async def meet(
        self, resumes: Resumption | None = None, process: str = "p", port: int | None = None
    ) -> Channel[ToAgent]:
        channel = await connect("127.0.0.1", port or self.coordinator.address.port, TOKEN, JOB_ID, TO_AGENT)
        self._channels.append(channel)
        channel.send(AgentHello("a", "host", 2, PROTOCOL_VERSION, process=process, is_apart=True, resumes=resumes))
        return channel


async def receive(channel: Channel[ToAgent], kind: type[MessageT]) -> MessageT:
    """The next message of this kind."""
    async with asyncio.timeout(DEADLINE_S):
        while not isinstance(message := await channel.receive(), kind):
            pass
    return message


def taken_over(handled: int, epoch: int = 1, process: str = "p") -> tuple[Message, Epoch]:
    """An agent that was told to start two workers meets the next coordinator: its answer."""

    async def test() -> tuple[Message, Epoch]:
        first = Epoch()
        async with first.serves():
            channel = await first.meet()
            assert (await receive(channel, Welcome)).epoch == 1
            for _ in range(2):
                await receive(channel, Spawn)
        second = first.next()
        async with second.serves():
            channel = await second.meet(Resumption(epoch, handled), process)
            async with asyncio.timeout(DEADLINE_S):
                return await channel.receive(), second

    return run(test())


@pytest.mark.parametrize("handled", [0, 1, 2])
def test_orders_that_an_agent_has_not_handled_are_sent_again(handled: int) -> None:
    async def test() -> None:
        first = Epoch()
        async with first.serves():
            channel = await first.meet()
            sent = [await receive(channel, Spawn) for _ in range(2)]
        second = first.next()
        async with second.serves() as serving:
            channel = await second.meet(Resumption(1, handled))
            assert (await receive(channel, Resumed)).epoch == 2
            assert [await receive(channel, Spawn) for _ in sent[handled:]] == sent[handled:]
            second.coordinator.request_stop(True, "a test")
            while not serving.done():
                message = await channel.receive()
                if isinstance(message, JobOver):
                    channel.abort()
                    break
            assert (await serving).reason

    run(test())


def test_a_report_counts_once_whether_its_confirmation_arrived_or_not() -> None:
    async def test() -> None:
        first = Epoch()
        async with first.serves():
            channel = await first.meet()
            spawned = await receive(channel, Spawn)
            channel.send(WorkerExited(spawned.worker, 1, (), "", 1))
            assert (await receive(channel, Handled)).count == 1
        second = first.next()
        async with second.serves():
            resumed = await receive(await second.meet(Resumption(1, 2)), Resumed)
            assert resumed.handled == 1

    run(test())


def test_an_agent_that_comes_before_the_next_coordinator_is_ready_is_not_taken_for_a_stranger() -> None:
    async def test() -> None:
        first = Epoch()
        async with first.serves():
            channel = await first.meet()
            await receive(channel, Spawn)
        second, port = first.next(), first.coordinator.address.port

        async def meet() -> Resumed:
            while True:
                with contextlib.suppress(ConnectionError):
                    return await receive(await second.meet(Resumption(1, 1), port=port), Resumed)
                await asyncio.sleep(0.01)

        meeting = asyncio.create_task(meet())
        async with second.serves():
            assert (await meeting).epoch == 2

    run(test())


def test_another_process_under_the_name_of_an_agent_has_no_session() -> None:
    answer, _ = taken_over(handled=2, process="another")
    assert isinstance(answer, SessionOver)
    assert "has lost agent a" in answer.reason


def test_an_agent_that_knows_more_than_the_journal_is_told_to_begin_anew() -> None:
    answer, second = taken_over(handled=3)
    assert isinstance(answer, SessionOver)
    assert "not that which agent a knows: messages after 3 were requested, 0 to 2 are kept" in answer.reason
    assert second.events.of(AgentWasLost)


def test_an_agent_of_a_later_coordinator_turns_an_outdated_one_away_and_not_itself() -> None:
    async def test() -> None:
        outdated = Epoch()
        async with outdated.serves():
            await receive(await outdated.meet(), Spawn)
            with pytest.raises(ConnectionError):
                await receive(await outdated.meet(Resumption(2, 1)), Resumed)
            (refused,) = outdated.events.of(ConnectionRefused)
            assert "epoch 2, which has replaced this one of epoch 1" in refused.reason

    run(test())


def test_the_end_of_a_job_is_told_by_the_next_coordinator_to_agents_that_have_not_heard_of_it() -> None:
    async def test() -> None:
        first = Epoch()
        async with first.serves():
            channel = await first.meet()
            spawned = [await receive(channel, Spawn) for _ in range(2)]
            first.coordinator.request_stop(True, "a test")
            for each in spawned:
                channel.send(WorkerExited(each.worker, -9, (), "", 1))
            await receive(channel, JobOver)
        second = first.next()
        async with second.serves() as serving:
            channel = await second.meet(Resumption(1, 2))
            over = await receive(channel, JobOver)
            channel.abort()
            async with asyncio.timeout(DEADLINE_S):
                assert (await serving).reason == over.reason

    run(test())


@pytest.mark.parametrize(
    ("is_cut_off", "outlives_silence", "is_longer"), [(True, False, False), (False, False, True), (True, True, True)]
)
def test_workers_of_an_agent_without_a_connection_may_run_for_its_patience_longer(
    is_cut_off: bool, outlives_silence: bool, is_longer: bool
) -> None:
    """And those of an agent that is cut off, where another coordinator may take over."""

    async def test() -> float:
        config = JobConfig(num_proc=2, grace_s=0.0, takes_agents=True, detection_budget_s=0.3)
        epoch = Epoch(config=config, welcome=replace(WELCOME, outlives_silence=outlives_silence))
        async with epoch.serves():
            channel = await epoch.meet()
            await receive(channel, Spawn)
            if not is_cut_off:
                channel.abort()  # it sees the end of the connection, too, and waits for the next coordinator
            await epoch.events.next(AgentWasLost)
            assert epoch.state is not None
            state: CoordinatorState = pickle.loads(epoch.state)
            assert state.job.lease_end_s is not None
            return state.job.lease_end_s - state.now_s

    lease_s = run(test())
    assert PATIENCE_S - 0.3 < lease_s < PATIENCE_S + 0.3 if is_longer else lease_s < 0.3


def test_what_an_agent_is_told_on_another_connection_is_in_the_journal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the agent forgets a message that no later coordinator has seen."""
    monkeypatch.setattr(decision_loop, "rest_s", lambda _took_s: DEADLINE_S)  # after the first decision

    async def test() -> None:
        first = Epoch()
        async with first.serves():
            channel = await first.meet()
            await receive(channel, Welcome)
            spawns = [await receive(channel, Spawn) for _ in range(2)]
            channel.send(WorkerExited(spawns[0].worker, -9, (), "", 1))
            async with asyncio.timeout(DEADLINE_S):
                while not first.now.sessions["a"].log.handled:
                    await asyncio.sleep(0.001)
            told = await receive(await first.meet(Resumption(1, 2)), Resumed)
            assert told.handled == 1
        second = first.next()
        async with second.serves():
            known = await receive(await second.meet(Resumption(1, 2)), Resumed)
        assert known.handled == told.handled

    run(test())


def test_a_report_that_waits_for_a_decision_is_not_lost_with_a_coordinator_that_has_written_its_journal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Events that belong to no decision, such as a refused connection, are written between two decisions."""
    monkeypatch.setattr(decision_loop, "rest_s", lambda _took_s: DEADLINE_S)  # after the first decision

    async def test() -> None:
        first = Epoch()
        async with first.serves():
            channel = await first.meet()
            spawned = await receive(channel, Spawn)
            channel.send(WorkerExited(spawned.worker, -9, (), "", 1))
            async with asyncio.timeout(DEADLINE_S):
                while not first.now.sessions["a"].log.handled:
                    await asyncio.sleep(0.001)
            first.coordinator.outbox.commit()
        assert first.state is not None
        state: CoordinatorState = pickle.loads(first.state)
        assert state.sessions["a"].log.handled == 1
        assert spawned.worker not in state.job.workers

    run(test())


# A journal that takes its time, as a store on another machine does ----------------------------------------------------


async def silent_for(channel: Channel[ToAgent], seconds: float, *but: type[Message]) -> bool:
    """Whether nothing arrives meanwhile, but messages of these kinds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while isinstance(await channel.receive(), but):
                pass
            return False
    return True


def test_nothing_that_was_decided_is_told_before_the_journal_has_it() -> None:
    async def test() -> None:
        first = Epoch()
        async with first.serves():
            first.is_slow = True
            channel = await first.meet()
            await first.begin_to_write()
            assert await silent_for(channel, 0.2, Welcome, CoordinatorHeartbeat)
            first.end_writing()
            assert await receive(channel, Spawn)

    run(test())


def test_what_is_decided_while_the_journal_is_written_is_told_after_it_was_written_again() -> None:
    async def test() -> None:
        first = Epoch()
        async with first.serves():
            first.is_slow = True
            channel = await first.meet()
            await first.begin_to_write()
            first.coordinator.request_stop(True, "a test")
            assert len(first.writing) == 1
            first.writing[0].set_result(None)
            spawned = await receive(channel, Spawn)
            await first.begin_to_write()
            channel.send(WorkerExited(spawned.worker, -9, (), "", 1))
            assert await silent_for(channel, 0.2, Spawn, CoordinatorHeartbeat)
            first.end_writing()
            assert await receive(channel, Kill)

    run(test())


def test_an_agent_is_told_on_another_connection_only_what_the_journal_has() -> None:
    """It forgets the reports that were handled, and gets the orders that it has not handled, also those of a decision
    that the journal has only then."""

    async def test() -> None:
        first = Epoch()
        async with first.serves():
            channel = await first.meet()
            spawns = [await receive(channel, Spawn) for _ in range(2)]
            first.is_slow = True
            channel.send(WorkerExited(spawns[0].worker, -9, (), "", 1))
            await first.begin_to_write()
            again = await first.meet(Resumption(1, 2))
            assert await silent_for(again, 0.2)
            first.end_writing()
            told = await receive(again, Resumed)
            assert told.handled == 1
        second = first.next()
        async with second.serves():
            known = await receive(await second.meet(Resumption(1, 2)), Resumed)
        assert known.handled == 1

    run(test())


def test_the_next_coordinator_tells_its_epoch_when_the_journal_has_it() -> None:
    async def test() -> None:
        first = Epoch()
        async with first.serves():
            channel = await first.meet()
            await receive(channel, Spawn)
        second = first.next()
        second.is_slow = True
        async with second.serves():
            again = await second.meet(Resumption(1, 1))
            assert await silent_for(again, 0.2)
            second.end_writing()
            assert (await receive(again, Resumed)).epoch == 2
            assert await receive(again, Spawn)

    run(test())


@pytest.mark.parametrize("is_first", [True, False])
def test_the_silence_of_an_agent_that_has_to_wait_for_the_journal_does_not_count(is_first: bool) -> None:
    """For the first state of a coordinator, or for a later one, when the connection of the agent has ended."""

    async def test() -> None:
        config = JobConfig(num_proc=2, grace_s=0.0, takes_agents=True, detection_budget_s=0.3)
        first = Epoch(config=config)
        async with first.serves():
            channel = await first.meet()
            spawned = [await receive(channel, Spawn) for _ in range(2)]
            if not is_first:
                first.is_slow = True
                channel.send(WorkerExited(spawned[0].worker, -9, (), "", 1))
                await first.begin_to_write()
                again = await first.meet(Resumption(1, 2))
                assert await silent_for(again, 1.0)
                first.end_writing()
                assert (await receive(again, Resumed)).handled == 1
        if is_first:
            second = Epoch(first.state, first.coordinator.address.port, config)
            second.is_slow = True
            async with second.serves():
                await asyncio.sleep(1.0)
                second.end_writing()
                assert await receive(await second.meet(Resumption(1, 2)), Resumed)

    run(test())


def test_a_journal_that_is_not_written_in_time_ends_the_connection_and_the_agent_comes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_greeting, "HANDSHAKE_DEADLINE_S", 0.2)

    async def test() -> None:
        first = Epoch()
        async with first.serves():
            await receive(await first.meet(), Spawn)
        second = first.next()
        second.is_slow = True
        async with second.serves():
            with pytest.raises(ConnectionError):
                await receive(await second.meet(Resumption(1, 1)), Resumed)
            assert "was not written within 0.2 s" in second.events.of(ConnectionRefused)[0].reason
            second.end_writing()
            assert await receive(await second.meet(Resumption(1, 1)), Resumed)

    run(test())
