"""The coordinator's shell: it feeds the messages of agents and the clock to `decide`, and sends messages to agents. It
also answers the user's commands.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeAlias

import msgspec

from farandole.base.config import JobConfig
from farandole.base.events import ConnectionRefused, CoordinatorStalled, Event, JobRebuilding
from farandole.base.liveness.heartbeats import heartbeat_period_s
from farandole.base.machine import different_software, installed_software, now_s
from farandole.base.membership import Address, Origin
from farandole.base.wire.channel import (
    AGENT_MESSAGES,
    CALL_RECEIVED,
    CLIENT_MESSAGES,
    DIALERS_MESSAGES,
    GUARD_MESSAGES,
    HANDSHAKE_DEADLINE_S,
    Channel,
    accept,
)
from farandole.base.wire.control import ClientHello, ClientMessage, Status
from farandole.base.wire.encryption import Certificates, load_certificates
from farandole.base.wire.function_call import FunctionJob, send_call
from farandole.base.wire.listening import FailureBudget, Listener, RefusalReports, Strangers
from farandole.base.wire.message_log import MessageLog, is_counted
from farandole.base.wire.messages import (
    AgentDied,
    AgentHello,
    AgentLeaving,
    AgentMessage,
    GuardHello,
    Handled,
    Heartbeat,
    OutputMessage,
    PartReceived,
    Refused,
    Resumed,
    Resumption,
    ReturnPart,
    SessionOver,
    Spawn,
    StacksWritten,
    TellWorkers,
    ToAgent,
    Welcome,
    WorkerDying,
    WorkerExited,
    WorkerPrinted,
    WorkerRanked,
    WorkerSilent,
    WorkersTold,
    WriteStacks,
)
from farandole.base.wire.sockets import listening_sockets
from farandole.errors import AuthenticationError, ConfigError, ProtocolError
from farandole.job.coordinator.admission import why_not_admitted
from farandole.job.coordinator.command_server import Clients
from farandole.job.coordinator.control_requests import JobSummary
from farandole.job.coordinator.decide import decide, next_deadline
from farandole.job.coordinator.failure_detection import HangDetector, JobClock, Silence
from farandole.job.coordinator.heartbeat_port import AgentHeartbeats
from farandole.job.coordinator.inputs import (
    AgentConnected,
    AgentLost,
    AgentReported,
    DrainRequested,
    HostsOffered,
    Input,
    ScaleRequested,
    StepsSeen,
    StopRequested,
    Tick,
)
from farandole.job.coordinator.job import new_job
from farandole.job.coordinator.journal import AgentSession, CoordinatorState
from farandole.job.coordinator.rebuilding import ToldAgent, is_enough, rebuilt, why_not_believed
from farandole.job.coordinator.store_server import Store, StoreServer
from farandole.job.coordinator.transition import Action, EndJob, Log, SendAgent

_SHORTEST_WAIT_S = 0.001

TELLING_S = 2 * HANDSHAKE_DEADLINE_S
"""Seconds for which agents may tell of their workers after the journal was lost. They look for this coordinator every
half second, and may be held up by addresses that do not answer."""

_SHORT_REST_S = 0.02
_Outgoing: TypeAlias = tuple[Channel[AgentMessage], ToAgent]
_RETURN_LOOK_S = 0.02  # at the end of a job, between two looks for agents of the former coordinator


def rest_s(took_s: float) -> float:
    """Return for how long inputs are gathered after a decision that took so long.

    While all members of a large job report, within a second, most of its coordinator's time would else be spent on
    conclusions from a few reports at a time. The decision of a small job is over before the next message has come.
    """
    return min(4 * took_s, max(took_s, _SHORT_REST_S)) if took_s > _SHORTEST_WAIT_S else 0.0


@dataclass(frozen=True)
class Outcome:
    """The result of a job: the exit code for the command line, and the reason."""

    exit_code: int
    reason: str


class Coordinator:
    """`await start()`, then `await run()`; call everything else on their event loop.

    The end of an agent's connection counts as silence: the agent is lost after the detection budget, unless it resumes
    its session on another connection before. An agent that begins another session under the same name has ended its old
    workers, and joins without workers.

    welcome    the first message to remote agents; None: they may not join
    on_output  called with an agent and its message about its workers' output; None: no more will come
    offers_joined  whether hosts whose agents join by themselves count as offered, with their slots, as long as they
                   stay; otherwise only those of `offer` do, once it was called
    first_hosts  as in new_job
    function   of a job of farandole.run()
    store      the job's store; None: it has its own
    journal    called with the state after each decision, before any message about the decision is sent; these wait for
               the future, if it returns one, and meanwhile it is not called again
    restored   the state from which it continues; None: the job begins
    returning_s  for so much longer agents of the former coordinator may be silent at first: they look for this one
    """

    def __init__(
        self,
        config: JobConfig,
        token: bytes,
        *,
        job_id: str,
        hosts: Sequence[str] = ("127.0.0.1",),
        port: int = 0,
        on_event: Callable[[Event], None],
        clock: Callable[[], float] = now_s,
        origin: Origin | None = None,
        welcome: Welcome | None = None,
        on_output: Callable[[str, OutputMessage | None], None] = lambda _agent, _message: None,
        offers_joined: bool = False,
        first_hosts: Mapping[str, int] = MappingProxyType({}),
        function: FunctionJob | None = None,
        store: Store | None = None,
        journal: Callable[[CoordinatorState], asyncio.Future[None] | None] | None = None,
        restored: CoordinatorState | None = None,
        returning_s: float = 0.0,
    ) -> None:
        self._function = function
        self._config, self._token, self._job_id = config, token, job_id
        self._tls: Certificates | None = None
        self._hosts, self._port = tuple(hosts), port
        self._budget = FailureBudget()
        self._listener = Listener(self._on_connection, self._budget)
        self._on_event = self._remembering(on_event)
        self._refused = RefusalReports(self._on_event)
        self._job = new_job(config, job_id, origin=origin, first_hosts=first_hosts)
        self._clock = JobClock(clock, tolerance_s=config.detection_budget_s / 4)
        self._silence = Silence(config.detection_budget_s)
        self._welcome, self._on_output = welcome, on_output
        self._heartbeats = AgentHeartbeats(token, config.detection_budget_s, self._clock.now_s, self._silence.record)
        self._offers_joined = offers_joined
        self._offered: dict[str, int] = {}
        self._joined: dict[str, int] = {}  # hosts beside those, with the slots of their agents
        self._next_heartbeat_s = 0.0
        self._hang_detector = HangDetector(config.step_timeout_s)
        self._sessions: dict[str, AgentSession] = {}  # of the agents that are connected or were until just now
        self._channels: dict[str, Channel[AgentMessage]] = {}
        self._commands = Clients(
            lambda: self._job,
            self._decide,
            self._clock.now_s,
            self._hang_detector.steps,
            self._ask_for_stacks,
            self.caught_up,
        )
        self._telemetry = self._commands.telemetry
        self._serving: set[asyncio.Task[None]] = set()
        self._strangers: Strangers[asyncio.Task[None]] = Strangers(self._make_room, self._budget)
        self._agent_hosts: set[str] = set()  # from which an agent has connected
        self._store = StoreServer(self._on_event) if store is None else store
        self._attempt = 0
        self._journal, self._restored, self._returning_s = journal, restored, returning_s
        self._returning: set[str] = set()  # agents of the former coordinator that have not come yet
        self._lost = ""  # why there is no former state: nothing is decided until agents have told what the job is
        self._told: dict[str, ToldAgent] = {}
        self._outgoing: list[_Outgoing] = []  # to be sent once the journal has them
        self._writing: asyncio.Future[None] | None = None  # of the journal, which has the newest state only then
        self._commits = self._commits_written = 0
        self._has_begun = asyncio.Event()
        self._conversations: set[asyncio.Task[None]] = set()
        self._look_timer: asyncio.TimerHandle | None = None
        self._tick_timer: asyncio.TimerHandle | None = None
        self._inbox: list[Input] = []  # inputs on which the next decision is made, at the latest at this time:
        self._decision: asyncio.TimerHandle | asyncio.Handle | None = None
        self._rests_until_s = 0.0  # by the clock of the event loop
        self._next_hang_look_s = 0.0
        self._knows_steps = False  # the inbox contains the newest number of decided steps

    async def start(self) -> None:
        """Listen for connections. Raises ConfigError when that fails, for example because the port is in use, and when
        the job's certificates cannot be used."""
        self._tls = load_certificates(self._config.tls)
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[Outcome] = self._loop.create_future()
        if self._restored is not None:
            self._continue_from(self._restored)  # before it listens: an agent that is unknown ends its workers
        try:
            await self.listen(self._hosts)
        except ConfigError:
            self._listener.close()
            raise
        self._set_tick(next_deadline(self._job))
        self.commit()  # the next one to take over has a higher epoch, and listens at the same addresses
        self._look()

    def _continue_from(self, state: CoordinatorState) -> None:
        """Take over the job and its sessions; their agents will resume them. Its clock continues where that of the
        former coordinator has stopped: no deadline passes meanwhile."""
        self._clock.continue_from(state.now_s)
        self._job = replace(state.job, coordinator_epoch=state.job.coordinator_epoch + 1)
        if state.lost:
            self._lost, self._lost_s = state.lost, self._clock.now_s()
            self._on_event(JobRebuilding(state.lost, TELLING_S))
            return
        self._attempt, self._offered, self._joined = state.attempt, dict(state.offered), dict(state.joined)
        self._agent_hosts |= state.agent_hosts
        for agent, session in state.sessions.items():
            self._sessions[agent] = session
            self._returning.add(agent)
            if session.is_apart:
                self._heartbeats.begin(agent)
        if self._job.ending is not None and self._job.ending.is_done:
            self._outcome.set_result(Outcome(self._job.ending.exit_code, self._job.ending.reason))

    def _record_silence(self, agent: str, session: AgentSession, after_s: float = 0.0) -> None:
        """Count the silence of an agent from now, or later. The launcher's own agents cannot be cut off from a
        coordinator on the same machine, and are silent while the launcher is stopped, as in a debugger; their silence
        counts only where workers of other hosts could go on without them."""
        if session.is_apart or self._journal is None or any(each.is_apart for each in self._sessions.values()):
            self._silence.record(agent, self._clock.now_s() + after_s)
        else:
            self._silence.forget(agent)

    def _state(self) -> CoordinatorState:
        return CoordinatorState(
            job=self._job,
            now_s=self._clock.now_s(),
            attempt=self._attempt,
            sessions=self._sessions,
            offered=self._offered,
            joined=self._joined,
            agent_hosts=frozenset(self._agent_hosts),
            addresses=self._listener.addresses,
            lost=self._lost,
        )

    async def listen(self, hosts: Sequence[str]) -> None:
        """Listen on further addresses of this machine, on the same port. Raises ConfigError when that fails."""
        known = self._listener.addresses
        port = known[0].port if known else self._port
        try:
            sockets = listening_sockets(hosts, port)
        except OSError as error:
            advice = "choose another --port, or leave it out to get a free one"
            if error.errno == errno.EADDRNOTAVAIL:
                advice = "choose an address of this machine"
            raise ConfigError(
                f"the coordinator cannot listen on {' and '.join(hosts)} port {port}: {error.strerror}; {advice}"
            ) from error
        self._listener.open(sockets)
        await self._store.open(*hosts)
        if self._welcome is not None:
            for address in self._listener.addresses[len(known) :]:
                await self._heartbeats.open(address)

    @property
    def address(self) -> Address:
        """The first address to which agents connect."""
        return self._listener.addresses[0]

    @property
    def addresses(self) -> tuple[Address, ...]:
        """All addresses to which agents may connect."""
        return self._listener.addresses

    @property
    def store_port(self) -> int:
        """The port of the job's store, at the same address."""
        return self._store.address.port

    async def run(self) -> Outcome:
        """Serve until the job has ended and its agents have closed their connections (they get the grace period and one
        detection budget for that). Cancellation closes all connections."""
        try:
            outcome = await self._outcome
            await self.caught_up()
            patience_s = self._config.grace_s + self._config.detection_budget_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    while self._returning:  # to be told the end of the job
                        await asyncio.sleep(_RETURN_LOOK_S)
            self._listener.close()
            for command in self._serving:
                command.cancel()  # the end of the connection tells it that the job has ended
            if self._conversations:
                await asyncio.wait(self._conversations, timeout=patience_s)
            return outcome
        finally:
            await self._close()

    def status(self) -> Status:
        """Return the status of the job now."""
        return self._commands.status()

    def summary(self) -> JobSummary:
        """Return the summary of the job now."""
        return self._commands.summary()

    @property
    def has_ended(self) -> bool:
        """True when the job is over; its agents have been told so."""
        return self._outcome.done()

    def request_stop(self, now: bool, reason: str) -> None:
        """End the job: with grace for the workers, or at once."""
        self._decide(StopRequested(now, reason))

    def offer(self, slots: Mapping[str, int], may_change: bool) -> None:
        """Set the hosts, with their slots, that the job may use from now on; the workers of other hosts leave. Before
        the first call the job uses all slots that its agents offer. `may_change`: other hosts may be offered later."""
        self._offered = dict(slots)
        self._decide(HostsOffered({**self._offered, **self._joined}, may_change))

    def drain(self, host: str, reason: str) -> None:
        """Let the workers of a host leave at the next boundary: it will be taken away."""
        self._decide(DrainRequested(host, reason))

    def agent_gone(self, agent: str, reason: str, are_workers_gone: bool = True) -> None:
        """Handle that an agent is gone, as the system has seen that started it. Unless `are_workers_gone`, they may run
        until the end of its lease."""
        if agent in self._sessions and not self.has_ended:
            self._lose(agent, reason, None if are_workers_gone else self._lease_end_s(agent))
            self._settle()

    def lose_own_agents(self, reason: str) -> None:
        """Handle that the launcher is gone of which some agents were a part; their guard has killed their workers."""
        for agent in [agent for agent, session in self._sessions.items() if not session.is_apart]:
            self.agent_gone(agent, reason)

    def agent_leaves(self, agent: str, reason: str) -> None:
        """Let the workers of one agent leave at the next boundary: it will be taken away."""
        if agent in self._sessions and not self.has_ended:
            self._decide(AgentReported(agent, AgentLeaving(reason)))

    def scale(self, size: int) -> None:
        """Ask for `size` workers."""
        self._decide(ScaleRequested(size))

    def _ask_for_stacks(self, worker: str, number: int) -> str:
        known = self._job.workers.get(worker)
        if known is None:
            return "it has ended"
        if known.slot.agent not in self._channels:
            return f"the agent of {known.slot.agent} is not connected"
        self._send(known.slot.agent, WriteStacks(number, worker))
        return ""

    def remember(self, event: Event) -> None:
        """Keep an event of the launcher or of an agent of its process, for commands that want the job's events."""
        self._commands.remember(event)

    def _remembering(self, on_event: Callable[[Event], None]) -> Callable[[Event], None]:
        def remember(event: Event) -> None:
            self._commands.remember(event)
            on_event(event)

        return remember

    # Deciding ---------------------------------------------------------------------------------------------

    def _report(self, happened: Input) -> None:
        """Let an input be decided together with the others that arrive at the same time."""
        self._inbox.append(happened)
        if self._decision is None:
            delay_s = self._rests_until_s - self._loop.time()
            if delay_s > 0:
                self._decision = self._loop.call_later(delay_s, self._settle)
            else:
                self._decision = self._loop.call_soon(self._settle)  # after all tasks whose sockets have been read

    def _decide(self, happened: Input) -> None:
        """Decide on an input now, after those that have arrived before."""
        self._inbox.append(happened)
        self._settle()

    def _settle(self) -> None:
        """Make one decision on all inputs that have arrived."""
        if self._decision is not None:
            self._decision.cancel()
            self._decision = None
        if self._lost and not self._may_rebuild():
            return
        inputs, self._inbox = self._inbox, []
        self._knows_steps = False
        if not inputs:
            return
        self._notice_stall()
        began_s = self._loop.time()
        try:
            actions = self._rebuild() if self._lost else []
            self._job, decided = decide(self._job, inputs, self._clock.now_s())
            actions += decided
            deadline_s = next_deadline(self._job)
        except Exception as error:  # noqa: BLE001 - a bug in a rule ends the job, and says so
            self._fail(error)
            return
        for action in actions:
            self._do(action)
        try:
            self.commit()
        except OSError as error:  # no room for the journal: nothing that was decided may be sent
            self._fail(error)
            return
        self._set_tick(deadline_s)
        ended_s = self._loop.time()
        self._rests_until_s = ended_s + rest_s(ended_s - began_s)

    def _may_rebuild(self) -> bool:
        """Return whether the agents have had the time to tell of their workers, or the user wants the job to end."""
        waited_s = self._clock.now_s() - self._lost_s
        patience_s = 0.0 if self._welcome is None else self._welcome.patience_s
        is_time = waited_s >= TELLING_S and (is_enough(self._told, self._config.num_proc) or waited_s >= patience_s)
        return is_time or any(isinstance(each, StopRequested) for each in self._inbox)

    def _rebuild(self) -> list[Action]:
        """Replace the job by that of which the agents have told; the inputs since then wait."""
        self._job, actions = rebuilt(self._job, self._told, self._lost, self._clock.now_s())
        self._attempt, self._lost, self._told = self._job.attempt, "", {}
        return actions

    def _do(self, action: Action) -> None:
        if isinstance(action, SendAgent):
            self._send(action.agent, action.message)
        elif isinstance(action, Log):
            self._on_event(action.event)
        elif isinstance(action, EndJob) and not self._outcome.done():
            self._outcome.set_result(Outcome(action.exit_code, action.reason))

    def _send(self, agent: str, message: ToAgent) -> None:
        if isinstance(message, Spawn) and message.attempt > self._attempt:
            # torch numbers its keys from 0 in each process: they must not meet those of the attempt before.
            self._attempt = message.attempt
            self._store.clear()
        channel = self._channels.get(agent)
        if not is_counted(message):
            if channel is not None:
                channel.send(message)
            return
        if (session := self._sessions.get(agent)) is not None:
            session.log.keep(message)
        if channel is not None:
            self._outgoing.append((channel, message))

    def commit(self) -> None:
        """Write the state to the journal, and send what was decided."""
        self._commits += 1
        if self._writing is None:
            self._write_journal()

    def _write_journal(self) -> None:
        if self._inbox and not self._lost:
            # The state counts their messages as handled, and the agents forget them: it must have the consequences.
            self._settle()  # commits
            return
        number, outgoing, self._outgoing = self._commits, self._outgoing, []
        handled = [(session, session.log.handled) for session in self._sessions.values()]
        writing = None if self._journal is None else self._journal(self._state())
        if writing is None:
            self._on_written(number, handled, outgoing)
        else:
            self._writing = writing
            writing.add_done_callback(lambda _: self._on_written(number, handled, outgoing))

    def _on_written(
        self, number: int, handled: Sequence[tuple[AgentSession, int]], outgoing: Sequence[_Outgoing]
    ) -> None:
        self._writing, self._commits_written = None, number
        for session, count in handled:
            session.journaled = count
        _send_all(outgoing)
        if not self._has_begun.is_set():
            self._answer_agents()
        if self._commits > number:
            try:
                self._write_journal()
            except OSError as error:
                self._fail(error)

    def _answer_agents(self) -> None:
        """Begin to answer agents: the journal has the epoch that they are told. From now on their silence counts."""
        self._has_begun.set()
        for agent in self._returning:
            self._record_silence(agent, self._sessions[agent], self._returning_s)

    def _flush(self) -> None:
        """Send what was decided: at once if the journal has it, else with the next state."""
        if self._writing is not None:
            self.commit()
            return
        outgoing, self._outgoing = self._outgoing, []
        _send_all(outgoing)

    async def caught_up(self) -> None:
        """Wait until the journal has everything that was decided until now."""
        number = self._commits
        while self._writing is not None and self._commits_written < number:
            await asyncio.wait([self._writing])

    def _fail(self, error: BaseException) -> None:
        """End the run because of an internal error, not only the connection or the timer that met it."""
        if not self._outcome.done():
            self._outcome.set_exception(error)

    def _set_tick(self, deadline_s: float | None) -> None:
        if self._tick_timer is not None:
            self._tick_timer.cancel()
            self._tick_timer = None
        if deadline_s is not None and not self._outcome.done():
            delay_s = max(deadline_s - self._clock.now_s(), _SHORTEST_WAIT_S)
            self._tick_timer = self._loop.call_later(delay_s, self._decide, Tick())

    def _notice_stall(self) -> None:
        if stalled_s := self._clock.notice_stall():
            self._on_event(CoordinatorStalled(stalled_s))

    def _look(self) -> None:
        """Look for agents that have become silent, and schedule the next look."""
        self._refused.flush()
        self._notice_stall()
        for agent, silent_s in self._silence.look(self._clock.now_s()).items():
            budget_s = self._job.config.detection_budget_s
            reason = f"nothing was received from it for {silent_s:.2f} s (--detection-budget {budget_s:g})"
            self._lose(agent, reason, self._lease_end_s(agent), silent_s)
        if self._lost and self._may_rebuild():
            self._decide(Tick())
        if self._clock.now_s() >= self._next_hang_look_s:
            self._next_hang_look_s = self._clock.now_s() + self._hang_detector.look_every_s
            if (stalled := self._hang_detector.look(self._job, self._clock.now_s())) is not None:
                self._decide(stalled)
        if self._clock.now_s() >= self._next_heartbeat_s:
            every_s = heartbeat_period_s(self._config.detection_budget_s, len(self._channels))
            self._hang_detector.heartbeat_s = every_s
            self._next_heartbeat_s = self._clock.now_s() + every_s - self._silence.look_every_s / 2
            self._heartbeats.heartbeat(self._send, every_s)
            self._confirm()
        self._clock.expect_look(self._silence.look_every_s)
        self._look_timer = self._loop.call_later(self._silence.look_every_s, self._look)

    def _confirm(self) -> None:
        """Tell the agents how many of their messages were handled."""
        for agent, channel in self._channels.items():
            session = self._sessions[agent]
            handled = session.log.handled if self._journal is None else session.journaled
            if handled > session.confirmed:
                session.confirmed = handled
                channel.send(Handled(handled))

    def _lease_end_s(self, agent: str) -> float | None:
        """Return until when the workers of an agent that is lost now may run; None: it is not on another machine. An
        agent that has seen the end of its connection waits for the next coordinator, and keeps its workers meanwhile.
        Where another one may take over from this one, so does an agent that hears nothing any more.
        """
        end_s = self._heartbeats.lease_end_s(agent)
        if end_s is None or self._welcome is None:
            return end_s
        waits = agent not in self._channels or self._welcome.outlives_silence
        return end_s + (self._welcome.patience_s if waits else 0.0)

    def _lose(self, agent: str, reason: str, lease_end_s: float | None = None, silent_s: float = 0.0) -> None:
        if not all(isinstance(each, AgentLost) for each in self._inbox):
            self._settle()  # what it reported before counts
        self._report_steps()
        self._silence.forget(agent)
        self._hang_detector.forget(agent)
        self._telemetry.pop(agent, None)
        self._heartbeats.forget(agent)
        self._sessions.pop(agent, None)
        self._returning.discard(agent)
        if (channel := self._channels.pop(agent, None)) is not None:
            channel.abort()
        self._on_output(agent, None)
        if self._told.pop(agent, None) is None:  # else it counts as one that has told nothing
            self._report(AgentLost(agent, reason, lease_end_s, silent_s))
        if self._joined.pop(agent, None) is not None:
            self.offer(self._offered, may_change=True)

    def _report_steps(self) -> None:
        """Report the number of decided steps, as far as it is known, before a worker is lost."""
        if not self._knows_steps:
            self._knows_steps = True
            step = max(self._hang_detector.steps().values(), default=0)
            if step > self._job.steps_seen:
                self._report(StepsSeen(step))

    # Connections: unauthenticated until token and hello, then an agent's or a command's --------------------

    def _on_connection(self, connected: socket.socket, who: str) -> None:
        task = self._loop.create_task(self._converse(connected, who), name=who)
        task.add_done_callback(self._on_conversation_over)
        task.add_done_callback(lambda _: connected.close())  # also of a task that was cancelled before it began
        self._strangers.add(task)

    def _make_room(self, stranger: asyncio.Task[None]) -> None:
        stranger.cancel()
        newer = f"{len(self._strangers)} newer connections have not proved the token either"
        self._refused(ConnectionRefused(stranger.get_name(), f"it has not proved the token, and {newer}"))

    def _on_conversation_over(self, task: asyncio.Task[None]) -> None:
        self._strangers.failed(task)
        self._conversations.discard(task)
        self._serving.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _converse(self, connected: socket.socket, who: str) -> None:
        try:
            channel = await accept(connected, self._token, self._job_id, DIALERS_MESSAGES, self._tls)
            try:
                hello = await _receive_hello(channel)
                if isinstance(hello, ClientHello):
                    await self._serve_command(channel.expecting(CLIENT_MESSAGES))
                elif isinstance(hello, GuardHello):
                    await self._serve_guard(channel.expecting(GUARD_MESSAGES), hello)
                else:
                    await self._serve(channel.expecting(AGENT_MESSAGES), hello)
            finally:
                channel.abort()
        except (AuthenticationError, ProtocolError) as error:
            self._refused(ConnectionRefused(who, str(error)))
        except ConnectionError as error:
            # An agent is judged by its silence; a guard ends with its agent; a command is done.
            if (task := asyncio.current_task()) is not None and task in self._strangers:
                self._refused(ConnectionRefused(who, str(error)))

    async def _serve_command(self, channel: Channel[ClientMessage]) -> None:
        self._introduced(self._serving)
        await self._commands.serve(channel)

    async def _serve_guard(self, channel: Channel[AgentDied], hello: GuardHello) -> None:
        """Wait for the report that the guard's agent has died: its workers are killed, and need not be waited for."""
        self._introduced(self._serving)
        await channel.receive()
        session = self._sessions.get(hello.agent)
        if session is not None and session.process == hello.process:
            self._lose(hello.agent, "its process has ended; its guard has killed its workers")

    def _introduced(self, group: set[asyncio.Task[None]]) -> None:
        """Move the current task to the group of its peer, which is known now."""
        task = asyncio.current_task()
        assert task is not None
        self._strangers.proved(task)
        self._serving.discard(task)
        group.add(task)

    async def _serve(self, channel: Channel[AgentMessage], hello: AgentHello) -> None:
        async with _journal_deadline():
            await self._has_begun.wait()
        if hello.resumes is None:
            await self._begin(channel, hello)
        elif self._lost and self._has_not_told(hello, hello.resumes):
            await self._begin_anew(channel, hello, hello.resumes)
        else:
            await self._resume(channel, hello, hello.resumes)
        try:
            while True:
                self._handle(hello.agent, channel, await channel.receive())
        finally:
            if self._channels.get(hello.agent) is channel:
                del self._channels[hello.agent]

    async def _begin(self, channel: Channel[AgentMessage], hello: AgentHello) -> None:
        """Begin a session with an agent that has no workers yet."""
        if hello.is_apart and (refused := self._why_refused(hello)) is not None:
            channel.send(refused)
            raise ProtocolError(refused.reason)
        if hello.is_apart and self._function is not None:
            self._introduced(self._serving)  # the end of the job does not wait for it
            await send_call(channel.expecting(CALL_RECEIVED), self._function.call)
            if (refused := self._why_refused(hello)) is not None:  # another one has joined meanwhile
                channel.send(refused)
                raise ProtocolError(refused.reason)
        self._introduced(self._conversations)
        self._admit(channel.peer_host)
        if hello.agent in self._sessions:
            self._lose(hello.agent, "it connected again")
            self._settle()  # no order to the lost agent may reach the one that has come
        if hello.is_apart and self._welcome is not None:
            heartbeat_id = self._heartbeats.begin(hello.agent)
            channel.send(
                msgspec.structs.replace(
                    self._welcome,
                    heartbeat_id=heartbeat_id,
                    heartbeat_port=self._heartbeats.udp_port,
                    store_port=self.store_port,
                    epoch=self._job.coordinator_epoch,
                )
            )
        self._sessions[hello.agent] = AgentSession(
            hello.process, hello.is_apart, MessageLog(), protocol=channel.version
        )
        self._channels[hello.agent] = channel
        self._record_silence(hello.agent, self._sessions[hello.agent])
        if self._offers_joined and hello.host not in self._offered:
            self._joined[hello.agent] = hello.slots  # an agent on another machine has the name of its host
            self.offer(self._offered, may_change=True)
        self._report(AgentConnected(hello.agent, hello.host, hello.slots))

    async def _resume(self, channel: Channel[AgentMessage], hello: AgentHello, resumes: Resumption) -> None:
        """Continue the session of an agent, whose workers run, on a new connection."""
        self._check_epoch(hello, resumes)
        session = self._sessions.get(hello.agent)
        if session is not None and session.process == hello.process:
            self._record_silence(hello.agent, session, HANDSHAKE_DEADLINE_S)  # it may have to wait for the journal
            if (former := self._channels.pop(hello.agent, None)) is not None:
                former.abort()  # no more of its messages is handled
        # The agent forgets what it is told was handled, so the journal must have it.
        self._settle()
        async with _journal_deadline():
            await self.caught_up()
        session, reason = self._sessions.get(hello.agent), ""
        if session is None or session.process != hello.process or resumes.epoch < session.epoch:
            reason = f"the coordinator has lost agent {hello.agent}, and continues without its workers"
        else:
            try:
                unhandled = session.log.after(resumes.handled)
            except ProtocolError as error:
                reason = f"the coordinator's state is not that which agent {hello.agent} knows: {error}"
                self._lose(hello.agent, reason)
        if session is None or reason:
            channel.send(SessionOver(reason))
            raise ProtocolError(reason)
        session.log.confirm(resumes.handled)
        session.confirmed, session.protocol = session.log.handled, channel.version
        self._continue_on(channel, hello.agent, session)
        self._outgoing += [(channel, message) for message in unhandled]
        self._flush()

    def _has_not_told(self, hello: AgentHello, resumes: Resumption) -> bool:
        """Return whether this agent, whose workers run, has not told of them, or does not know that it has."""
        session = self._sessions.get(hello.agent)
        return session is None or (session.process == hello.process and resumes.epoch < session.epoch)

    async def _begin_anew(self, channel: Channel[AgentMessage], hello: AgentHello, resumes: Resumption) -> None:
        """Let an agent whose workers run tell of them, and begin another session with it."""
        self._check_epoch(hello, resumes)
        channel.send(TellWorkers(self._job.coordinator_epoch))
        try:
            async with asyncio.timeout(HANDSHAKE_DEADLINE_S):
                told = await channel.receive()
        except TimeoutError:
            raise ConnectionError(f"it told nothing within {HANDSHAKE_DEADLINE_S:g} s") from None
        if not isinstance(told, WorkersTold):
            raise ProtocolError(f"it sent {type(told).__name__} instead of WorkersTold")
        others = {name: each.hello.slots for name, each in self._told.items()}
        reason = why_not_admitted(hello, others) or why_not_believed(self._job_id, hello, told, self._told)
        if not self._lost:
            reason = "the job was rebuilt without it, and continues without its workers"
        if reason:
            channel.send(SessionOver(reason))
            raise ProtocolError(reason)
        self._told[hello.agent] = ToldAgent(hello, told)
        session = AgentSession(hello.process, hello.is_apart, MessageLog(), protocol=channel.version)
        session.epoch = self._job.coordinator_epoch
        self._sessions[hello.agent] = session
        self._continue_on(channel, hello.agent, session)
        if told.leaving:
            self._report(AgentReported(hello.agent, AgentLeaving(told.leaving)))

    def _check_epoch(self, hello: AgentHello, resumes: Resumption) -> None:
        if resumes.epoch > self._job.coordinator_epoch:
            raise ProtocolError(
                f"agent {hello.agent} serves a coordinator of epoch {resumes.epoch}, which has replaced this one of "
                f"epoch {self._job.coordinator_epoch}"
            )

    def _continue_on(self, channel: Channel[AgentMessage], agent: str, session: AgentSession) -> None:
        """Continue a session on this connection."""
        self._introduced(self._conversations)
        self._admit(channel.peer_host)
        if (former := self._channels.pop(agent, None)) is not None:
            former.abort()
        self._channels[agent] = channel
        self._returning.discard(agent)
        self._record_silence(agent, session)
        heartbeat_id = self._heartbeats.begin(agent) if session.is_apart else b""
        channel.send(
            Resumed(
                self._job.coordinator_epoch,
                session.log.handled,
                heartbeat_id,
                self._heartbeats.udp_port if session.is_apart else 0,
                self.store_port,
            )
        )

    def _admit(self, host: str) -> None:
        self._agent_hosts.add(host)
        self._store.admit(host)

    def _why_refused(self, hello: AgentHello) -> Refused | None:
        """Return the refusal for a remote agent that may not join, or None."""
        if self._welcome is None:
            return Refused(
                "this job does not accept agents of other machines (farandole run --token-file)", is_final=True
            )
        others = {agent: self._job.agents[agent].slots for agent in self._channels if agent in self._job.agents}
        if reason := why_not_admitted(hello, others):
            return Refused(reason, is_final=True)
        if different := different_software(hello.software, installed_software()):
            return Refused(different, is_final=True)
        session = self._sessions.get(hello.agent)
        if session is not None and session.process != hello.process:
            return Refused(f"host {hello.agent} already has an agent", is_final=False)
        return None

    def _handle(self, agent: str, channel: Channel[AgentMessage], message: AgentMessage) -> None:
        if self._channels.get(agent) is not channel:
            return  # Outdated: the agent was declared lost, or has connected again.
        if isinstance(message, Heartbeat):  # first, because they are most messages of a large job
            self._on_heartbeat(agent, message)
            return
        if isinstance(message, AgentHello):
            raise ProtocolError(f"agent {agent} sent AgentHello twice")
        if isinstance(message, WorkersTold):
            raise ProtocolError(f"agent {agent} sent WorkersTold without a request")
        if isinstance(message, Handled):
            self._sessions[agent].log.confirm(message.count)
            return
        if is_counted(message):
            self._sessions[agent].log.handled += 1
        if agent not in self._heartbeats:
            self._record_silence(agent, self._sessions[agent])
        if isinstance(message, WorkerPrinted | WorkerRanked | WorkerSilent):
            self._on_output(agent, message)
        elif isinstance(message, ReturnPart):
            if self._function is not None:
                self._function.on_return(message)
            self._send(agent, PartReceived(message.worker))
            self.commit()
        elif isinstance(message, StacksWritten):
            self._commands.stacks.on_written(message)
        else:
            if isinstance(message, WorkerExited | WorkerDying):
                self._report_steps()
            self._report(AgentReported(agent, message))

    def _on_heartbeat(self, agent: str, message: Heartbeat) -> None:
        if agent in self._heartbeats:
            self._heartbeats.record(agent, message.sequence, message.received or 0)
        else:
            self._record_silence(agent, self._sessions[agent])
        if message.workers is not None:
            self._hang_detector.record(agent, message.workers, self._clock.now_s())
        if message.telemetry is not None:
            self._telemetry[agent] = message.telemetry

    async def _close(self) -> None:
        self._listener.close()
        self._store.close()
        self._heartbeats.close()
        for timer in (self._look_timer, self._tick_timer, self._decision):
            if timer is not None:
                timer.cancel()
        conversing = {*self._strangers, *self._conversations, *self._serving}
        for task in conversing:
            task.cancel()
        await asyncio.gather(*conversing, return_exceptions=True)


def _send_all(outgoing: Sequence[_Outgoing]) -> None:
    for channel, message in outgoing:
        channel.send(message)


@contextlib.asynccontextmanager
async def _journal_deadline() -> AsyncIterator[None]:
    """Give the block the time of a handshake. The agent connects again."""
    try:
        async with asyncio.timeout(HANDSHAKE_DEADLINE_S):
            yield
    except TimeoutError:
        raise ConnectionError(f"the state of the job was not written within {HANDSHAKE_DEADLINE_S:g} s") from None


async def _receive_hello(
    channel: Channel[AgentMessage | GuardHello | ClientMessage],
) -> AgentHello | GuardHello | ClientHello:
    try:
        async with asyncio.timeout(HANDSHAKE_DEADLINE_S):
            message = await channel.receive()
    except TimeoutError:
        raise ConnectionError(f"it sent no AgentHello within {HANDSHAKE_DEADLINE_S:g} s") from None
    if not isinstance(message, AgentHello | GuardHello | ClientHello):
        raise ProtocolError(f"it sent {type(message).__name__} before AgentHello")
    return message
