"""A job: the coordinator, and the fleet of its agents, on one event loop. cli.py runs it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from farandole.base.config import ForkServerUse, JobConfig, Preemption
from farandole.base.env import carried_environment, inherited_environment
from farandole.base.events import (
    AgentsAwaited,
    Event,
    GenerationStarted,
    HostDrained,
    HostUndrained,
    JobNotAnnounced,
    StopAsked,
)
from farandole.base.machine import wall_time_s
from farandole.base.membership import Address, Origin
from farandole.base.wire.authentication import new_token
from farandole.base.wire.encryption import load_certificates
from farandole.base.wire.function_call import FunctionJob
from farandole.base.wire.messages import Welcome
from farandole.job.agent.agent import Agent
from farandole.job.agent.agent_config import AgentConfig
from farandole.job.agent.host_resources import reserve_descriptors, share_cores, workers_at_most
from farandole.job.agent.network_addresses import addresses_for, own_addresses, with_others
from farandole.job.agent.preemption import Notice, watch_for_notices
from farandole.job.agent.remote_agent import RemoteOutput, with_own_python
from farandole.job.coordinator.control_requests import JobSummary
from farandole.job.coordinator.coordinator_factory import CoordinatorFactory
from farandole.job.coordinator.launcher_link import SUMMARY_EVERY_S, CoordinatorSetup
from farandole.job.coordinator.server import Coordinator, Outcome
from farandole.job.engines.discovery import HostDiscovery, HostsOver, HostsSource
from farandole.job.engines.engine_interface import AgentOrder, Engine, HostReports, HostWatch
from farandole.job.engines.fleet import Fleet
from farandole.job.engines.host_list import HostSlots
from farandole.job.engines.local_engine import HostsEngine, LocalEngine
from farandole.job.launch.ending_signals import ending_signals
from farandole.job.launch.job_files import JobFile, announced, born, shared
from farandole.job.launch.job_state import JobState
from farandole.job.launch.joining import Joining
from farandole.job.launch.output import OutputOptions, OutputSink
from farandole.job.launch.page_address import PageProcess
from farandole.job.launch.state_copies import StateCopies
from farandole.job.launch.supervised_coordinator import CoordinatorFailed, SupervisedCoordinator
from farandole.job.launch.terminal_line import TerminalLine

_LOOPBACK = "127.0.0.1"
PATIENCE_S = 10.0
"""Seconds for which agents wait for the next coordinator of a living launcher, which needs a fraction of one."""

_SUCCESSOR_LOOK_S = 1.0
_FAREWELL_S = 15.0  # beyond the grace period, for agents to end when the job is over


class EngineEvents:
    """A listener for engines, which are made before the job: their events go to `on_event`, and from the start of the
    coordinator also to it, so that commands and the page show them."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        self.remember: Callable[[Event], None] | None = None

    def __call__(self, event: Event) -> None:
        self._on_event(event)
        if self.remember is not None:
            self.remember(event)


@dataclass(frozen=True, kw_only=True)
class JobSetup:
    """How a job runs.

    config, command    the command of the workers. An empty first word stands for the Python of each agent
    hosts              where workers run, in the order of their ranks: each name is a host of its own. Or a repeated
                       discovery. None: localhost, with as many slots as the job may ever need.
    engine_events      the listener that engine, hosts and watch have; None: they report nothing
    engine             starts the agents of hosts that are other machines; it is closed at the end. None: such hosts are
                       refused. An engine that is also `hosts` starts the agents of all of them, also of this machine
    interfaces         the network interfaces to be used between hosts; empty: those that lead to the other hosts
    remote_folder      the working directory of workers on other machines; empty: the path of this process's own
    host, port         the address of the coordinator. Empty: loopback, or where hosts are other machines the addresses
                       at which they may reach it; port 0 lets the system choose
    output             for the sink
    on_event           called with each event of the job
    extra_environment  variables of the workers in addition to those of this process
    origin             the beginning of the job's numbers; given when it writes checkpoints
    joining            the other agents that may offer slots; given when config.takes_agents
    fork_server        whether replacements are forked by a process that has imported torch. While it makes one, this
                       process becomes the parent of its descendants' orphans
    sink               takes the workers' output instead of one that is made of `output`; it is closed at the end
    error_folder       the folder for the workers' error files on this machine; empty: they are removed with the job
    order_of_hosts     all hosts that agents may offer, with their slots, in the order of their ranks; None: any may
                       join, in any order
    watch              observes hosts from which agents join by themselves; None: only their heartbeats count
    preemption         where preemption notices are looked for, on this machine and by the agents that are started on
                       others; None: nowhere. One of this machine ends the job as SIGTERM does: the coordinator goes
                       with the machine, and a checkpoint is still possible
    reason_to_end      returns for an event why the job must end, with grace; empty: it need not
    state              outlives this launcher; None: its end is the end of the job
    patience_s         how long agents of other machines keep their workers when they have no coordinator
    factory            forks the coordinators, and is closed at the end; None: one is started
    page               serves the live page of the job; None: none is served
    line               the line below the output on the terminal; None: there is none
    on_summary         called with a summary of the job about once a second; None: none is made
    function           the call that travels to all agents, and the receiver of their workers' returns; of jobs of
                       farandole.run(), which need no folder of theirs
    """

    config: JobConfig
    command: Sequence[str]
    hosts: tuple[HostSlots, ...] | HostDiscovery | None = None
    engine_events: EngineEvents | None = None
    engine: Engine | None = None
    interfaces: Sequence[str] = ()
    remote_folder: str = ""
    host: str = ""
    port: int = 0
    output: OutputOptions
    on_event: Callable[[Event], None]
    extra_environment: Mapping[str, str] = field(default_factory=dict)
    origin: Origin | None = None
    joining: Joining | None = None
    fork_server: ForkServerUse = "off"
    sink: OutputSink | None = None
    error_folder: str = ""
    order_of_hosts: Mapping[str, int] | None = None
    watch: HostWatch | None = None
    preemption: Preemption | None = None
    reason_to_end: Callable[[Event], str] | None = None
    state: JobState | None = None
    patience_s: float = PATIENCE_S
    factory: CoordinatorFactory | None = None
    page: PageProcess | None = None
    line: TerminalLine | None = None
    on_summary: Callable[[JobSummary], None] | None = None
    function: FunctionJob | None = None


async def run_job(setup: JobSetup) -> Outcome:
    """Run the job until it has ended; none of its processes is left then, whatever was raised. In the main thread the
    first SIGINT, SIGTERM or SIGHUP ends the job with grace, a second SIGINT or SIGTERM at once.

    Raises ConfigError when the coordinator cannot listen, when a host cannot be used or all have fewer slots than the
    requested workers, when the first discovery fails, and when this process may not open as many files as the job
    needs.
    """
    try:
        outcome = await _JobRun(setup).run()
        if setup.state is not None:
            setup.state.end(is_over=True)
        return outcome
    except CoordinatorFailed as error:
        return Outcome(1, str(error))
    finally:
        if setup.state is not None:
            setup.state.end(is_over=False)


class _JobRun:
    """One job, from the search for its hosts to its end: `await run()`, once."""

    def __init__(self, setup: JobSetup) -> None:
        self._setup, self._config = setup, setup.config
        self._remember: Callable[[Event], None] = lambda event: None  # the coordinator's, once there is one
        self._is_of_engine = setup.engine is not None and id(setup.hosts) == id(setup.engine)
        self._source = HostsSource(
            setup.config, setup.hosts, setup.engine is not None, self._on_event, are_all_others=self._is_of_engine
        )
        self._command = with_own_python(setup.command)
        self._forks: ForkServerUse = setup.fork_server if setup.config.may_start_workers_again else "off"
        self._tls = load_certificates(self._config.tls)
        self._job_id = secrets.token_hex(8)
        self._token = new_token() if setup.joining is None else setup.joining.token
        if setup.state is not None:
            self._job_id, self._token = setup.state.job_id, setup.state.token

    async def run(self) -> Outcome:
        """Run the job to its end."""
        setup, joining = self._setup, self._setup.joining
        first = await self._source.first()
        here = sum(each.slots for each in first if each.name not in self._source.others)
        reserve_descriptors(max(here, self._config.max_np or 0))
        self._sink = OutputSink(setup.output, line=setup.line) if setup.sink is None else setup.sink
        try:
            self._coordinator = await self._start_coordinator()
            self._remember = self._coordinator.remember
            if setup.engine_events is not None:
                setup.engine_events.remember = self._coordinator.remember
            if joining is not None:
                address, file = str(self._coordinator.address), str(joining.job_file or "")
                self._on_event(AgentsAwaited(address, joining.token_file, file))
            self._environment = {**inherited_environment(), **setup.extra_environment}
            if here:
                slots = workers_at_most(self._config, here)
                self._environment = share_cores(self._environment, slots, self._on_event)
            self._fleet = self._make_fleet()
            with (
                shared(None if joining is None else joining.job_file, self._job_file()),
                contextlib.nullcontext() if setup.page is None else setup.page.serve(self._job_file()),
                _ending_on_signals(self._coordinator, self._fleet, self._on_event, self._config.grace_s),
                announced(
                    self._job_id, self._coordinator.address, self._token, self._command, tls=self._config.tls
                ) as problem,
            ):
                if problem:
                    self._on_event(JobNotAnnounced(problem))
                if setup.order_of_hosts is not None:
                    self._coordinator.offer(setup.order_of_hosts, may_change=False)
                return await self._serve()
        finally:
            self._sink.close()

    # The coordinator, and where it can be reached -----------------------------------------------------------

    async def _start_coordinator(self) -> Coordinator | SupervisedCoordinator:
        setup, others = self._setup, self._source.others
        is_open = setup.joining is not None or bool(others) or not self._source.are_fixed
        may_be_reached = bool(others) or (setup.joining is not None and setup.joining.job_file is not None)
        listen_on: tuple[str, ...] = (_LOOPBACK,)
        if setup.host:
            listen_on = (setup.host,)
        elif may_be_reached:
            listen_on = await self._own_addresses() or listen_on
        welcome = self._welcome() if is_open else None
        output = RemoteOutput(self._sink)
        coordinator: Coordinator | SupervisedCoordinator
        if setup.function is None:
            coordinator = SupervisedCoordinator(
                CoordinatorSetup(
                    self._config,
                    self._token,
                    self._job_id,
                    listen_on,
                    setup.port,
                    setup.origin,
                    welcome,
                    self._is_of_engine,
                    self._first_hosts(),
                    launcher="" if setup.state is None else setup.state.launcher,
                    number=0 if setup.state is None else setup.state.number,
                    lost="" if setup.state is None else setup.state.lost,
                ),
                on_event=self._on_decision,
                on_output=output,
                factory=setup.factory,
                journal=None if setup.state is None else setup.state.journal_files,
                copies=None if setup.state is None else self._copies(setup.state),
                on_summary=setup.on_summary,
            )
        else:  # the calling program waits for the results: its end is the end of the job
            coordinator = Coordinator(
                self._config,
                self._token,
                job_id=self._job_id,
                hosts=listen_on,
                port=setup.port,
                on_event=self._on_decision,
                origin=setup.origin,
                welcome=welcome,
                on_output=output,
                offers_joined=self._is_of_engine,
                first_hosts=self._first_hosts(),
                function=setup.function,
            )
        await coordinator.start()
        return coordinator

    def _first_hosts(self) -> dict[str, int]:
        """Return the hosts of the agents that this process starts at once, with their slots. Of hosts that are
        discovered, only the order counts: a later discovery may miss them."""
        hosts = () if self._is_of_engine else self._source.hosts
        return {each.name: each.slots if self._source.are_fixed else 0 for each in hosts}

    def _welcome(self) -> Welcome:
        return Welcome(
            job_id=self._job_id,
            command=tuple(self._setup.command),
            folder=os.getcwd(),
            environment={**carried_environment(), **self._setup.extra_environment},
            detection_budget_s=self._config.detection_budget_s,
            grace_s=self._config.grace_s,
            is_elastic=self._config.may_change,
            fork_server=self._forks,
            max_restarts=self._config.max_restarts or 0,
            needs_folder=self._setup.function is None,
            patience_s=0.0 if self._setup.function is not None else self._setup.patience_s,
            outlives_silence=self._setup.state is not None,
        )

    def _job_file(self) -> JobFile:
        return JobFile(
            self._job_id,
            os.getpid(),
            born(os.getpid()),
            self._coordinator.address,
            self._token,
            tuple(self._setup.command),
            wall_time_s(),
            self._reachable(),
            self._config.tls,
        )

    async def _own_addresses(self) -> tuple[str, ...]:
        return await asyncio.to_thread(addresses_for, tuple(self._source.others), self._setup.interfaces)

    async def _addresses_for_others(self) -> tuple[Address, ...]:
        """Return the addresses at which other machines may reach the coordinator, which listens there then."""
        if not self._setup.host and all(each.host == _LOOPBACK for each in self._coordinator.addresses):
            await self._coordinator.listen(await self._own_addresses())  # the first other machine has come
        return self._reachable()

    def _reachable(self) -> tuple[Address, ...]:
        addresses = self._coordinator.addresses
        outside = tuple(each for each in addresses if self._setup.host or each.host != _LOOPBACK)
        return outside or addresses  # a machine without a network has loopback alone

    # The fleet ---------------------------------------------------------------------------------------------

    def _make_fleet(self) -> Fleet:
        local = LocalEngine(self._make_agent)
        return Fleet(
            HostsEngine(local, self._setup.engine, self._source.others, self._addresses_for_others),
            self._order_for,
            on_gone=self._coordinator.agent_gone,
            on_event=self._on_event,
            is_over=lambda: self._coordinator.has_ended,
            must_succeed=self._source.are_fixed or self._is_of_engine,
        )

    def _order_for(self, on: HostSlots) -> AgentOrder:
        return AgentOrder(
            on.name,
            on.slots,
            self._coordinator.addresses,
            self._token,
            folder=self._setup.remote_folder,
            interfaces=tuple(self._setup.interfaces),
            preemption=str(self._setup.preemption or Preemption()),
            tls=self._config.tls,
        )

    def _make_agent(self, order: AgentOrder) -> Agent:
        """Return the agent of a host name that is this machine."""
        setup, config = self._setup, self._config
        agent_config = AgentConfig(
            name=order.host,
            host=order.host,
            slots=order.slots,
            coordinator=self._coordinator.address,
            job_id=self._job_id,
            token=self._token,
            command=self._command,
            environment=self._environment,
            detection_budget_s=config.detection_budget_s,
            grace_s=config.grace_s,
            is_elastic=config.may_change,
            fork_server=self._forks,
            store_port=self._coordinator.store_port,
            max_restarts=config.max_restarts or 0,
            error_folder=setup.error_folder,
            data_hosts=self._data_hosts(),
            process=secrets.token_hex(8),
            patience_s=0.0 if setup.function is not None else float("inf"),  # the launcher ends it
            tls=self._tls,
        )
        call = b"" if setup.function is None else setup.function.call
        return Agent(agent_config, self._sink, self._on_event, call=call)

    def _data_hosts(self) -> tuple[str, ...]:
        """Return the addresses for tensors of this machine's workers; empty: as the agent chooses."""
        if self._setup.interfaces:
            return tuple(own_addresses(self._setup.interfaces))
        if self._setup.engine is not None and not self._source.are_fixed and not self._source.others:
            # The workers of a machine that comes later must reach those that run already.
            return with_others(_LOOPBACK)
        return ()

    # While it runs -----------------------------------------------------------------------------------------

    async def _serve(self) -> Outcome:
        coordinator, fleet, source = self._coordinator, self._fleet, self._source
        self._on_hosts(source.hosts)
        self._serving = asyncio.create_task(coordinator.run())
        tasks: set[asyncio.Task[Outcome] | asyncio.Task[None]] = {self._serving}
        tasks |= {asyncio.create_task(observe) for observe in self._observers()}
        try:
            done, _ = await asyncio.wait({*tasks, fleet.broken}, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
            await fleet.gone(self._config.grace_s + _FAREWELL_S)
            return self._serving.result()
        except asyncio.CancelledError:
            # Announced to all, as after a signal: an agent that loses its coordinator has to treat that as a fault.
            coordinator.request_stop(now=False, reason="the launcher was interrupted")
            await fleet.gone(self._config.grace_s + _FAREWELL_S)
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await fleet.close()

    def _observers(self) -> Iterator[Coroutine[None, None, None]]:
        """Yield what runs beside the coordinator, until it is cancelled."""
        setup = self._setup
        if not self._source.are_fixed:
            yield self._follow_hosts()
        if setup.watch is not None:
            yield setup.watch.run(HostReports(self._coordinator.agent_leaves, self._coordinator.agent_gone))
        if setup.state is not None and isinstance(self._coordinator, SupervisedCoordinator):
            yield self._watch_for_successor(setup.state, self._coordinator)
        if setup.preemption is not None:
            yield watch_for_notices(setup.preemption, self._on_notice, self._on_event)
        if setup.on_summary is not None and isinstance(self._coordinator, Coordinator):
            yield self._summarize(self._coordinator, setup.on_summary)

    async def _summarize(self, coordinator: Coordinator, on_summary: Callable[[JobSummary], None]) -> None:
        """Pass on what a coordinator of its own process sends to its launcher."""
        while True:
            await asyncio.sleep(SUMMARY_EVERY_S)
            on_summary(coordinator.summary())

    def _copies(self, state: JobState) -> StateCopies | None:
        if state.write_copy is None:
            return None
        return StateCopies(state.write_copy, self._setup.patience_s, self._on_event)

    async def _watch_for_successor(self, state: JobState, coordinator: SupervisedCoordinator) -> None:
        """End in silence when another launcher has taken the job over: this one, or its network, was away."""
        while not (successor := await asyncio.to_thread(state.successor)):
            await asyncio.sleep(_SUCCESSOR_LOOK_S)
        self._fleet.kill_workers()
        coordinator.abandon(f"another launcher, {successor}, has taken this job over")
        await asyncio.wait([self._serving])

    async def _follow_hosts(self) -> None:
        try:
            await self._source.follow(self._on_hosts)
        except HostsOver as error:
            self._coordinator.request_stop(now=False, reason=str(error))
            await asyncio.wait([self._serving])

    def _on_hosts(self, hosts: tuple[HostSlots, ...]) -> None:
        if self._is_of_engine or not self._config.takes_agents:  # else the job uses all slots that its agents offer
            self._coordinator.offer({each.name: each.slots for each in hosts}, may_change=not self._source.are_fixed)
        self._fleet.follow(hosts)

    def _on_event(self, event: Event) -> None:
        """Report an event of this process, which the coordinator keeps together with its own."""
        self._setup.on_event(event)
        self._remember(event)

    def _on_decision(self, event: Event) -> None:
        setup = self._setup
        if isinstance(event, HostDrained | HostUndrained):
            self._fleet.on_decision(event)
        elif isinstance(event, GenerationStarted) and event.bootstrap:
            self._fleet.training_begins()
        setup.on_event(event)
        if setup.reason_to_end is not None and (reason := setup.reason_to_end(event)):
            # Not at once: an event comes in the middle of a decision.
            asyncio.get_running_loop().call_soon(self._coordinator.request_stop, False, reason)

    def _on_notice(self, notice: Notice) -> None:
        if notice.must_leave:
            self._coordinator.request_stop(now=False, reason=notice.reason)


@contextlib.contextmanager
def _ending_on_signals(
    coordinator: Coordinator | SupervisedCoordinator, fleet: Fleet, on_event: Callable[[Event], None], grace_s: float
) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # farandole.run(): signals are handled by the calling program
        return

    was_sent = False

    def end(number: signal.Signals, is_urgent: bool) -> None:
        nonlocal was_sent
        if not was_sent and not coordinator.has_ended:
            was_sent = True
            on_event(StopAsked(number.name, grace_s))
        coordinator.request_stop(now=is_urgent, reason=f"{number.name} was received")
        if is_urgent:
            fleet.kill_workers()

    with ending_signals(end):
        yield


# Listeners of the job's events ----------------------------------------------------------------------------------------


def in_turn(*listeners: Callable[[Event], None] | None) -> Callable[[Event], None]:
    """Return a listener that hands each event to all `listeners`, in this order; None is left out."""
    present = [each for each in listeners if each is not None]

    def on_event(event: Event) -> None:
        for listener in present:
            listener(event)

    return on_event
