"""The coordinator around `decide`: its parts, what its launcher asks of it, and the state from which another one
continues.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from farandole.base.config import JobConfig
from farandole.base.events.event import Event
from farandole.base.events.host_events import JobRebuilding
from farandole.base.machine import now_s
from farandole.base.membership import Address, Origin
from farandole.base.wire.control import ClientHello
from farandole.base.wire.frames import AGENT_MESSAGES, CLIENT_MESSAGES, GUARD_MESSAGES
from farandole.base.wire.function_call import FunctionJob
from farandole.base.wire.messages import (
    AgentHello,
    AgentLeaving,
    GuardHello,
    OutputMessage,
    Spawn,
    Welcome,
    WriteStacks,
)
from farandole.errors import ConfigError
from farandole.job.coordinator import rebuilding
from farandole.job.coordinator.agent_greeting import AgentGreeting
from farandole.job.coordinator.agents import Agents, Watch
from farandole.job.coordinator.command_server import Clients
from farandole.job.coordinator.decision_loop import DecisionLoop, JobClock, Outbox, Write
from farandole.job.coordinator.hang_detection import HangDetector
from farandole.job.coordinator.job import Job, new_job
from farandole.job.coordinator.journal import CoordinatorState
from farandole.job.coordinator.reception import DialersChannel, Hello, Reception
from farandole.job.coordinator.store_server import Store, StoreServer
from farandole.job.coordinator.transition import Action, AgentReported, Log, Outcome, SendAgent, StopRequested

_RETURN_LOOK_S = 0.02  # at the end of a job, between two looks for agents of the former coordinator


@dataclass(frozen=True)
class CoordinatorSetup:
    """A job, and what its coordinator has to know of its launcher.

    hosts, port  the addresses of this machine at which it listens; port 0: a free one
    origin, first_hosts  as in new_job
    welcome    the first message to remote agents; None: they may not join
    offers_joined  whether hosts whose agents join by themselves count as offered, with their slots, as long as they
                   stay; otherwise only those of `offer` do, once it was called

    Where the coordinator is a process of its own:
    handled    the number of counted frames of former ones that the launcher has handled
    launcher   identifies this launcher, where another one may take over after it (launch/job_state.py); the journal
               lies in a folder then. Empty: its death is the end of the job
    wants_summaries  whether the launcher wants a JobSummary every SUMMARY_EVERY_S seconds
    number     how many launchers the job has had, with this one; its coordinators' epochs are above those of the former
               ones, whatever these were. 0: it is the only one
    lost       why the journal of the former launcher is lost: the agents are to tell what the job is; empty: it is not
    is_copied  whether the launcher writes a copy of each state to where the next launcher finds it: Copy, then Copied
    """

    config: JobConfig
    token: bytes = field(repr=False)
    job_id: str
    hosts: tuple[str, ...] = ("127.0.0.1",)
    port: int = 0
    origin: Origin | None = None
    welcome: Welcome | None = None
    offers_joined: bool = False
    first_hosts: Mapping[str, int] = field(default_factory=dict)
    handled: int = 0
    launcher: str = ""
    wants_summaries: bool = False
    number: int = 0
    lost: str = ""
    is_copied: bool = False


class Coordinator:
    """`await start()`, then `await run()`; call everything else on their event loop.

    The end of an agent's connection counts as silence: the agent is lost after the detection budget, unless it resumes
    its session on another connection before. An agent that begins another session under the same name has ended its old
    workers, and joins without workers.

    on_output  called with an agent and its message about its workers' output; None: no more will come
    function   of a job of farandole.run()
    store      the job's store; None: it has its own
    journal    called with the state after each decision, before any message about the decision is sent; these wait for
               the future, if it returns one, and meanwhile it is not called again
    restored   the state from which it continues; None: the job begins
    returning_s  for so much longer agents of the former coordinator may be silent at first: they look for this one

    Attributes:
        clients: Commands and pages, and what they are shown of the job.
        outbox: What was decided and is not sent yet.
    """

    def __init__(
        self,
        setup: CoordinatorSetup,
        *,
        on_event: Callable[[Event], None],
        clock: Callable[[], float] = now_s,
        on_output: Callable[[str, OutputMessage | None], None] = lambda _agent, _message: None,
        function: FunctionJob | None = None,
        store: Store | None = None,
        journal: Write | None = None,
        restored: CoordinatorState | None = None,
        returning_s: float = 0.0,
    ) -> None:
        self._setup, self._restored, self._show = setup, restored, on_event
        self._config = config = setup.config
        self._store = StoreServer(self._on_event) if store is None else store
        self._attempt = 0  # the newest one for which the store was emptied
        hang_detector = HangDetector(config.step_timeout_s)
        patience_s = 0.0 if setup.welcome is None else setup.welcome.patience_s
        self._decisions = decisions = DecisionLoop(
            new_job(config, setup.job_id, origin=setup.origin, first_hosts=setup.first_hosts),
            JobClock(clock, tolerance_s=config.detection_budget_s / 4),
            rebuilding.Retelling(config.num_proc, patience_s, self._on_rebuilt),
            steps=hang_detector.steps,
            act=self._act,
            has_ended=lambda: self.has_ended,
            fail=self._fail,
            on_event=self._on_event,
        )
        self.outbox = Outbox(
            journal, self._state, decisions.settle_all, lambda: self._agents.expect_returns(), self._fail
        )
        self.clients = Clients(decisions, self._ask_for_stacks, self.outbox.caught_up)
        self._agents = Agents(
            config,
            setup.token,
            decisions=decisions,
            outbox=self.outbox,
            hang_detector=hang_detector,
            clients=self.clients,
            welcome=setup.welcome,
            function=function,
            on_output=on_output,
            offers_joined=setup.offers_joined,
            returning_s=returning_s,
        )
        self._reception = Reception(config, setup.token, setup.job_id, self._serve, self._on_event, self._fail)
        self._greeting = AgentGreeting(self._agents, self._reception, self._store)
        self._watch = Watch(config.detection_budget_s, self._agents, self._reception.refused)

    async def start(self) -> None:
        """Listen for connections. Raises ConfigError when that fails, for example because the port is in use, and when
        the job's certificates cannot be used."""
        self._reception.load_certificates()
        self._outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        if self._restored is not None:
            self._continue_from(self._restored)  # before it listens: an agent that is unknown ends its workers
        try:
            await self.listen(self._setup.hosts)
        except ConfigError:
            self._reception.stop_listening()
            raise
        self._decisions.start()
        self.outbox.commit()  # the next one to take over has a higher epoch, and listens at the same addresses
        self._watch.start()

    def _continue_from(self, state: CoordinatorState) -> None:
        """Take over the job and its sessions; their agents will resume them. Its clock continues where that of the
        former coordinator has stopped: no deadline passes meanwhile."""
        self._decisions.clock.continue_from(state.now_s)
        self._decisions.job = job = replace(state.job, coordinator_epoch=state.job.coordinator_epoch + 1)
        if state.lost:
            self._decisions.retelling.begin(state.lost, self._decisions.clock.now_s())
            self._on_event(JobRebuilding(state.lost, rebuilding.TELLING_S))
            return
        self._attempt = state.attempt
        self._agents.offers.offered, self._agents.offers.joined = dict(state.offered), dict(state.joined)
        self._agents.restore(state)
        if job.ending is not None and job.ending.is_done:
            self._outcome.set_result(Outcome(job.ending.exit_code, job.ending.reason))

    def _state(self) -> CoordinatorState:
        return CoordinatorState(
            job=self._decisions.job,
            now_s=self._decisions.clock.now_s(),
            attempt=self._attempt,
            sessions=self._agents.by_agent,
            offered=self._agents.offers.offered,
            joined=self._agents.offers.joined,
            agent_hosts=frozenset(self._agents.hosts),
            addresses=self._reception.addresses,
            lost=self._decisions.retelling.reason,
        )

    async def listen(self, hosts: Sequence[str]) -> None:
        """Listen on further addresses of this machine, on the same port. Raises ConfigError when that fails."""
        known = len(self._reception.addresses)
        self._reception.open(hosts, self._setup.port)
        await self._store.open(*hosts)
        for address in self._reception.addresses[known:]:
            await self._agents.open(address)

    @property
    def address(self) -> Address:
        """The first address to which agents connect."""
        return self._reception.addresses[0]

    @property
    def addresses(self) -> tuple[Address, ...]:
        """All addresses to which agents may connect."""
        return self._reception.addresses

    @property
    def store_port(self) -> int:
        """The port of the job's store, at the same address."""
        return self._store.address.port

    async def run(self) -> Outcome:
        """Serve until the job has ended and its agents have closed their connections (they get the grace period and one
        detection budget for that). Cancellation closes all connections."""
        try:
            outcome = await self._outcome
            await self.outbox.caught_up()
            patience_s = self._config.grace_s + self._config.detection_budget_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    while self._agents.returning:  # to be told the end of the job
                        await asyncio.sleep(_RETURN_LOOK_S)
            await self._reception.finish(patience_s)
            return outcome
        finally:
            self._reception.stop_listening()
            self._store.close()
            self._agents.heartbeats.close()
            self._watch.close()
            self._decisions.close()
            await self._reception.close()

    # Requests of the launcher -----------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """True when the job is over; its agents have been told so."""
        return self._outcome.done()

    def request_stop(self, now: bool, reason: str) -> None:
        """End the job: with grace for the workers, or at once."""
        self._decisions.decide(StopRequested(now, reason))

    def offer(self, slots: Mapping[str, int], may_change: bool) -> None:
        """Set the hosts, with their slots, that the job may use from now on; the workers of other hosts leave. Before
        the first call the job uses all slots that its agents offer. `may_change`: other hosts may be offered later."""
        self._decisions.decide(self._agents.offers.offer(slots, may_change))

    def agent_gone(self, agent: str, reason: str, are_workers_gone: bool = True) -> None:
        """Handle that an agent is gone, as the system has seen that started it. Unless `are_workers_gone`, they may run
        until the end of its lease."""
        if agent in self._agents.by_agent and not self.has_ended:
            self._agents.lose(agent, reason, None if are_workers_gone else self._agents.lease_end_s(agent))
            self._decisions.settle()

    def lose_own_agents(self, reason: str) -> None:
        """Handle that the launcher is gone of which some agents were a part; their guard has killed their workers."""
        for agent in [agent for agent, session in self._agents.by_agent.items() if not session.is_apart]:
            self.agent_gone(agent, reason)

    def agent_leaves(self, agent: str, reason: str) -> None:
        """Let the workers of one agent leave at the next boundary: it will be taken away."""
        if agent in self._agents.by_agent and not self.has_ended:
            self._decisions.decide(AgentReported(agent, AgentLeaving(reason)))

    def remember(self, event: Event) -> None:
        """Keep an event of the launcher or of an agent of its process, for commands that want the job's events."""
        self.clients.remember(event)

    # Between the parts ------------------------------------------------------------------------------------

    async def _serve(self, channel: DialersChannel, hello: Hello) -> None:
        """Serve a command, the guard of an agent, or an agent, until the connection ends."""
        match hello:
            case ClientHello():
                self._reception.introduced(is_awaited=False)
                await self.clients.serve(channel.expecting(CLIENT_MESSAGES))
            case GuardHello(agent, process):
                self._reception.introduced(is_awaited=False)
                await channel.expecting(GUARD_MESSAGES).receive()  # that its agent has died: its workers are killed
                session = self._agents.by_agent.get(agent)
                if session is not None and session.process == process:
                    self._agents.lose(agent, "its process has ended; its guard has killed its workers")
            case AgentHello():
                connection = channel.expecting(AGENT_MESSAGES)
                await self._greeting.greet(connection, hello)
                try:
                    while True:
                        self._agents.handle(hello.agent, connection, await connection.receive())
                finally:
                    self._agents.disconnected(hello.agent, connection)

    def _act(self, actions: Sequence[Action]) -> None:
        """Do what was decided, and commit it."""
        for action in actions:
            if isinstance(action, SendAgent):
                if isinstance(action.message, Spawn) and action.message.attempt > self._attempt:
                    # torch numbers its keys from 0 in each process: they must not meet those of the attempt before.
                    self._attempt = action.message.attempt
                    self._store.clear()
                self._agents.send(action.agent, action.message)
            elif isinstance(action, Log):
                self._on_event(action.event)
            elif not self._outcome.done():
                self._outcome.set_result(action)
        self.outbox.commit()

    def _on_rebuilt(self, job: Job) -> None:
        self._attempt = job.attempt

    def _ask_for_stacks(self, worker: str, number: int) -> str:
        known = self._decisions.job.workers.get(worker)
        if known is None:
            return "it has ended"
        if known.slot.agent not in self._agents.channels:
            return f"the agent of {known.slot.agent} is not connected"
        self._agents.send(known.slot.agent, WriteStacks(number, worker))
        return ""

    def _on_event(self, event: Event) -> None:
        self.clients.remember(event)
        self._show(event)

    def _fail(self, error: BaseException) -> None:
        """End the run because of an internal error, not only the connection or the timer that met it."""
        if not self._outcome.done():
            self._outcome.set_exception(error)
