"""What waits for the journal of a coordinator, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from farandole.base.config import JobConfig
from farandole.base.wire.channel import Channel
from farandole.base.wire.message_log import MessageLog
from farandole.base.wire.messages import AgentMessage, Kill, ToAgent
from farandole.job.coordinator.decision_loop import Outbox
from farandole.job.coordinator.job import new_job
from farandole.job.coordinator.journal import AgentSession, CoordinatorState
from tests.support.waiting import run


class Ends(Channel[AgentMessage]):
    """Notes what is sent to an agent."""

    def __init__(self) -> None:
        self.sent: list[object] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


class Desk:
    """An outbox, whose journal has a state when the test says so."""

    def __init__(self) -> None:
        self.agent, self.session = Ends(), AgentSession("p", True, MessageLog[ToAgent]())
        self.writing: list[asyncio.Future[None]] = []
        self.failures: list[BaseException] = []
        self.begun = self.undecided = 0
        self.is_full = False
        self.outbox = Outbox(self._write, self._state, self._settle, self._on_begun, self.failures.append)

    def decide(self, worker: str) -> ToAgent:
        message = Kill(worker, 0.0, "")
        self.outbox.add(self.agent, message)
        self.outbox.commit()
        return message

    def _state(self) -> CoordinatorState:
        return CoordinatorState(new_job(JobConfig(2), "job"), 0.0, 0, {"a": self.session}, {}, {}, frozenset(), ())

    def _write(self, _state: CoordinatorState) -> asyncio.Future[None]:
        if self.is_full:
            raise OSError("no space left")
        self.writing.append(asyncio.get_running_loop().create_future())
        return self.writing[-1]

    def _settle(self) -> bool:
        if not self.undecided:
            return False
        self.undecided -= 1
        self.outbox.commit()
        return True

    def _on_begun(self) -> None:
        self.begun += 1

    async def written(self) -> None:
        """Let the journal have the state that is being written."""
        self.writing[-1].set_result(None)
        await asyncio.sleep(0)


def at_a_desk(test: Callable[[Desk], Awaitable[None]]) -> None:
    async def at_desk() -> None:
        await test(Desk())

    run(at_desk())


def test_a_message_waits_until_the_journal_has_its_decision() -> None:
    async def test(desk: Desk) -> None:
        message = desk.decide("w0")
        assert desk.agent.sent == []
        await desk.written()
        assert desk.agent.sent == [message]

    at_a_desk(test)


def test_decisions_during_a_write_wait_for_one_further_write_together() -> None:
    async def test(desk: Desk) -> None:
        messages = [desk.decide(f"w{number}") for number in range(3)]
        await desk.written()
        assert (len(desk.writing), desk.agent.sent) == (2, messages[:1])
        await desk.written()
        assert (len(desk.writing), desk.agent.sent) == (2, messages)

    at_a_desk(test)


def test_whoever_waits_for_the_journal_waits_for_what_was_decided_before_it_asked() -> None:
    async def test(desk: Desk) -> None:
        await desk.outbox.caught_up()
        desk.decide("w0")
        desk.decide("w1")
        waiting = asyncio.create_task(desk.outbox.caught_up())
        await desk.written()
        await asyncio.sleep(0)
        assert not waiting.done()
        await desk.written()
        await waiting

    at_a_desk(test)


def test_a_session_counts_as_written_what_was_handled_before_the_write_began() -> None:
    async def test(desk: Desk) -> None:
        desk.session.log.handled = 3
        desk.outbox.commit()
        desk.session.log.handled = 5
        await desk.written()
        assert desk.session.journaled == 3

    at_a_desk(test)


def test_what_has_arrived_is_decided_before_a_state_counts_it_as_handled() -> None:
    async def test(desk: Desk) -> None:
        desk.undecided = 1
        desk.outbox.commit()
        assert (desk.undecided, len(desk.writing)) == (0, 1)

    at_a_desk(test)


def test_what_the_journal_has_already_is_sent_again_at_once_and_the_rest_with_the_next_state() -> None:
    async def test(desk: Desk) -> None:
        desk.outbox.commit()
        await desk.written()
        first, second = Kill("w0", 0.0, ""), Kill("w1", 0.0, "")
        desk.outbox.add(desk.agent, first)
        desk.outbox.flush()
        assert desk.agent.sent == [first]
        desk.outbox.commit()
        desk.outbox.add(desk.agent, second)
        desk.outbox.flush()
        await desk.written()
        assert desk.agent.sent == [first]
        await desk.written()
        assert desk.agent.sent == [first, second]

    at_a_desk(test)


def test_agents_are_answered_once_the_journal_has_the_first_state() -> None:
    async def test(desk: Desk) -> None:
        beginning = asyncio.create_task(desk.outbox.begun())
        for _ in range(2):
            desk.outbox.commit()
            await asyncio.sleep(0)
            assert beginning.done() == bool(desk.begun)
            await desk.written()
        assert desk.begun == 1
        await beginning

    at_a_desk(test)


def test_a_full_journal_fails_the_decision_or_if_it_has_waited_the_run() -> None:
    async def test(desk: Desk) -> None:
        desk.decide("w0")
        desk.decide("w1")
        desk.is_full = True
        await desk.written()
        assert [str(each) for each in desk.failures] == ["no space left"]
        with pytest.raises(OSError, match="no space left"):
            desk.decide("w2")

    at_a_desk(test)


def test_without_a_journal_nothing_waits() -> None:
    desk = Desk()
    outbox = Outbox(None, lambda: pytest.fail("no state is needed"), lambda: False, lambda: None, desk.failures.append)
    message = Kill("w0", 0.0, "")
    outbox.add(desk.agent, message)
    outbox.commit()
    assert (outbox.has_journal, desk.agent.sent) == (False, [message])
