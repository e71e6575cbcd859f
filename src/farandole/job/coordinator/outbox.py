"""The outbox of a coordinator: what was decided is sent to agents once the journal has it.

So whatever an agent has seen is in the journal. While a write is under way, further decisions wait together for the
next one, of the newest state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeAlias

from farandole.base.wire.channel import Channel
from farandole.base.wire.messages import AgentMessage, ToAgent
from farandole.job.coordinator.journal import AgentSession, CoordinatorState

Write: TypeAlias = Callable[[CoordinatorState], "asyncio.Future[None] | None"]
_Outgoing: TypeAlias = tuple[Channel[AgentMessage], ToAgent]


class Outbox:
    """Used on one event loop. `commit` and `flush` raise OSError when the journal cannot be written.

    write     writes a state; messages wait for the future, if it returns one, and meanwhile it is not called again;
              None: there is no journal
    state     returns the state now
    settle    decides on what has arrived since the last decision, and commits; False: nothing has
    on_begun  called when the journal has the first state
    fail      called when a further state, of decisions that have waited, cannot be written
    """

    def __init__(
        self,
        write: Write | None,
        state: Callable[[], CoordinatorState],
        settle: Callable[[], bool],
        on_begun: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._write, self._state, self._settle = write, state, settle
        self._on_begun, self._fail = on_begun, fail
        self._messages: list[_Outgoing] = []
        self._writing: asyncio.Future[None] | None = None  # the journal has the newest state only then
        self._commits = self._written = 0
        self._has_begun = asyncio.Event()

    @property
    def has_journal(self) -> bool:
        """Whether another coordinator could continue from what is written."""
        return self._write is not None

    def add(self, channel: Channel[AgentMessage], message: ToAgent) -> None:
        """Send a message with the next state."""
        self._messages.append((channel, message))

    def commit(self) -> None:
        """Write the state, and send what was decided."""
        self._commits += 1
        if self._writing is None:
            self._write_state()

    def flush(self) -> None:
        """Send what was decided: at once if the journal has it, else with the next state."""
        if self._writing is not None:
            self.commit()
            return
        self._send(self._taken())

    async def caught_up(self) -> None:
        """Wait until the journal has everything that was decided until now."""
        number = self._commits
        while self._writing is not None and self._written < number:
            await asyncio.wait([self._writing])

    async def begun(self) -> None:
        """Wait until the journal has the first state."""
        await self._has_begun.wait()

    def _write_state(self) -> None:
        # The state counts the messages of inputs as handled, and the agents forget them: it must have the consequences.
        if self._settle():
            return
        number, messages = self._commits, self._taken()
        if self._write is None:
            self._on_written(number, (), messages)
            return
        state = self._state()
        handled = [(session, session.log.handled) for session in state.sessions.values()]
        writing = self._write(state)
        if writing is None:
            self._on_written(number, handled, messages)
        else:
            self._writing = writing
            writing.add_done_callback(lambda _: self._on_written(number, handled, messages))

    def _on_written(
        self, number: int, handled: Sequence[tuple[AgentSession, int]], messages: Sequence[_Outgoing]
    ) -> None:
        self._writing, self._written = None, number
        for session, count in handled:
            session.journaled = count
        self._send(messages)
        if not self._has_begun.is_set():
            self._has_begun.set()
            self._on_begun()
        if self._commits > number:
            try:
                self._write_state()
            except OSError as error:
                self._fail(error)

    def _taken(self) -> list[_Outgoing]:
        messages, self._messages = self._messages, []
        return messages

    def _send(self, messages: Sequence[_Outgoing]) -> None:
        for channel, message in messages:
            channel.send(message)
