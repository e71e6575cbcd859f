"""The loop that feeds what happens to `decide`: inputs that arrive at the same time are decided together, and the job's
next deadline is an input, too. What was decided waits in the outbox until the journal has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from farandole.base.events.event import Event
from farandole.base.events.job_events import CoordinatorStalled
from farandole.base.wire.channel import Channel
from farandole.base.wire.messages import AgentMessage, ToAgent
from farandole.job.coordinator.decide import decide, next_deadline
from farandole.job.coordinator.job import Job
from farandole.job.coordinator.journal import AgentSession, CoordinatorState
from farandole.job.coordinator.rebuilding import Retelling
from farandole.job.coordinator.transition import Action, AgentLost, Input, StepsSeen, Tick

_SHORTEST_WAIT_S = 0.001
_SHORT_REST_S = 0.02


def rest_s(took_s: float) -> float:
    """Return for how long inputs are gathered after a decision that took so long.

    While all members of a large job report, within a second, most of its coordinator's time would else be spent on
    conclusions from a few reports at a time. The decision of a small job is over before the next message has come.
    """
    return min(4 * took_s, max(took_s, _SHORT_REST_S)) if took_s > _SHORTEST_WAIT_S else 0.0


class JobClock:
    """The time of the job, which stands still while the coordinator itself cannot run.

    All deadlines of the job are kept in this time. So no deadline passes, and no agent is found silent, because the
    coordinator's process was stopped or starved and left messages unread.
    """

    def __init__(self, read_s: Callable[[], float], tolerance_s: float) -> None:
        self._read_s, self._tolerance_s = read_s, tolerance_s
        self._stalled_s = 0.0
        self._due_s: float | None = None

    def now_s(self) -> float:
        return self._read_s() - self._stalled_s

    def continue_from(self, now_s: float) -> None:
        """Let it be `now_s` now: where the clock of another coordinator has stopped."""
        self._stalled_s = self._read_s() - now_s

    def expect_look(self, delay_s: float) -> None:
        """Announce that the coordinator will look again in `delay_s`."""
        self._due_s = self._read_s() + delay_s

    def notice_stall(self) -> float:
        """Return the seconds by which the expected look is late, when that is beyond the tolerance; else 0. From then
        on they are not counted. Call it before any judgement."""
        late_s = 0.0 if self._due_s is None else self._read_s() - self._due_s
        if late_s <= self._tolerance_s:
            return 0.0
        self._stalled_s += late_s
        self._due_s = self._read_s()
        return late_s


class DecisionLoop:
    """Used on one event loop: `start`, then inputs, then `close`.

    job        the state from which it begins
    retelling  while it is on, nothing is decided
    steps      returns, by worker, how many steps it had decided when it was last seen
    act        does what was decided, and commits it; raises OSError when the journal cannot be written
    has_ended  returns whether the job is over: no deadline matters any more
    fail       called with an error of a rule, or of `act`, which ends the run

    Attributes:
        job: The state after the last decision.
        clock, retelling, steps: As given.
    """

    def __init__(
        self,
        job: Job,
        clock: JobClock,
        retelling: Retelling,
        *,
        steps: Callable[[], Mapping[str, int]],
        act: Callable[[Sequence[Action]], None],
        has_ended: Callable[[], bool],
        fail: Callable[[BaseException], None],
        on_event: Callable[[Event], None],
    ) -> None:
        self.job = job
        self.clock, self.retelling, self.steps = clock, retelling, steps
        self._act, self._has_ended, self._fail, self._on_event = act, has_ended, fail, on_event
        self._inbox: list[Input] = []  # inputs on which the next decision is made, at the latest at this time:
        self._decision: asyncio.TimerHandle | asyncio.Handle | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._rests_until_s = 0.0  # by the clock of the event loop
        self._knows_steps = False  # the inbox contains the newest number of decided steps

    def start(self) -> None:
        """Begin to watch the deadlines of the job."""
        self._set_tick(next_deadline(self.job))

    def report(self, happened: Input) -> None:
        """Let an input be decided together with the others that arrive at the same time."""
        self._inbox.append(happened)
        if self._decision is None:
            loop = asyncio.get_running_loop()
            delay_s = self._rests_until_s - loop.time()
            if delay_s > 0:
                self._decision = loop.call_later(delay_s, self.settle)
            else:
                self._decision = loop.call_soon(self.settle)  # after all tasks whose sockets have been read

    def report_steps(self) -> None:
        """Report the number of decided steps, as far as it is known, before a worker is lost."""
        if not self._knows_steps:
            self._knows_steps = True
            step = max(self.steps().values(), default=0)
            if step > self.job.steps_seen:
                self.report(StepsSeen(step))

    def decide(self, happened: Input) -> None:
        """Decide on an input now, after those that have arrived before."""
        self._inbox.append(happened)
        self.settle()

    def settle(self) -> None:
        """Make one decision on all inputs that have arrived."""
        if self._decision is not None:
            self._decision.cancel()
            self._decision = None
        if self.retelling.reason and not self.may_rebuild():
            return
        inputs, self._inbox = self._inbox, []
        self._knows_steps = False
        if not inputs:
            return
        self.notice_stall()
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            actions: list[Action] = []
            if self.retelling.reason:  # the job is that of which the agents have told; the inputs since then wait
                self.job, actions = self.retelling.rebuild(self.job, self.clock.now_s())
            self.job, decided = decide(self.job, inputs, self.clock.now_s())
            deadline_s = next_deadline(self.job)
        except Exception as error:  # noqa: BLE001 - a bug in a rule ends the job, and says so
            self._fail(error)
            return
        try:
            self._act([*actions, *decided])
        except OSError as error:  # no room for the journal: nothing that was decided may be sent
            self._fail(error)
            return
        self._set_tick(deadline_s)
        ended_s = loop.time()
        self._rests_until_s = ended_s + rest_s(ended_s - began_s)

    def settle_all(self) -> bool:
        """Make a decision if inputs have arrived that need not wait for the agents to tell of the job."""
        if not self._inbox or self.retelling.reason:
            return False
        self.settle()
        return True

    def settle_reports(self) -> None:
        """Make a decision on what has arrived beside losses of agents, which are decided together."""
        if not all(isinstance(each, AgentLost) for each in self._inbox):
            self.settle()

    def may_rebuild(self) -> bool:
        return self.retelling.may_end(self.clock.now_s(), self._inbox)

    def notice_stall(self) -> None:
        """Report the time in which this process could not run. Call it before any judgement."""
        if stalled_s := self.clock.notice_stall():
            self._on_event(CoordinatorStalled(stalled_s))

    def close(self) -> None:
        """Stop the timers. Idempotent."""
        for timer in (self._decision, self._tick):
            if timer is not None:
                timer.cancel()

    def _set_tick(self, deadline_s: float | None) -> None:
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
        if deadline_s is not None and not self._has_ended():
            delay_s = max(deadline_s - self.clock.now_s(), _SHORTEST_WAIT_S)
            self._tick = asyncio.get_running_loop().call_later(delay_s, self.decide, Tick())


# The outbox -----------------------------------------------------------------------------------------------------------
#
# What was decided is sent to agents once the journal has it. So whatever an agent has seen is in the journal. While a
# write is under way, further decisions wait together for the next one, of the newest state.

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
