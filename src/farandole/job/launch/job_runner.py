"""A job: the coordinator, and the fleet of its agents, on one event loop. launcher.py runs it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from farandole.base.config import ForkServerUse
from farandole.base.env import carried_environment, inherited_environment
from farandole.base.events.event import Event
from farandole.base.events.generation_events import GenerationStarted
from farandole.base.events.host_events import AgentsAwaited, HostDrained, HostUndrained
from farandole.base.events.job_events import JobNotAnnounced, StopAsked
from farandole.base.machine import wall_time_s
from farandole.base.membership import Address
from farandole.base.wire.authentication import new_token
from farandole.base.wire.encryption import load_certificates
from farandole.base.wire.function_call import FunctionJob
from farandole.base.wire.messages import Welcome
from farandole.job.agent.agent import Agent, AgentConfig
from farandole.job.agent.host_resources import reserve_descriptors, share_cores
from farandole.job.agent.network_addresses import addresses_for, own_addresses, with_others
from farandole.job.agent.preemption import Notice, watch_for_notices
from farandole.job.agent.remote_agent import RemoteOutput, with_own_python
from farandole.job.coordinator.control_requests import JobSummary
from farandole.job.coordinator.coordinator_factory import CoordinatorFactory
from farandole.job.coordinator.launcher_link import SUMMARY_EVERY_S
from farandole.job.coordinator.server import Coordinator, CoordinatorSetup
from farandole.job.coordinator.transition import Outcome
from farandole.job.engines.discovery import HostDiscovery, HostsOver, HostsSource, ScriptDiscovery
from farandole.job.engines.engine_interface import AgentOrder, Engine, HostReports, HostWatch
from farandole.job.engines.fleet import Fleet
from farandole.job.engines.host_list import HostScript, HostSlots
from farandole.job.engines.local_engine import HostsEngine
from farandole.job.engines.ssh_engine import SshEngine
from farandole.job.launch.checkpoint_place import Beginning
from farandole.job.launch.ending_signals import ending_signals
from farandole.job.launch.job_files import JobFile, announced, born, own_namespace, shared
from farandole.job.launch.job_spec import JobSpec
from farandole.job.launch.job_state import JobState, StateCopies
from farandole.job.launch.output import OutputOptions, OutputSink
from farandole.job.launch.page_address import PageProcess
from farandole.job.launch.supervised_coordinator import CoordinatorFailed, SupervisedCoordinator
from farandole.job.launch.terminal_line import TerminalLine
from farandole.registry import factory

_LOOPBACK = "127.0.0.1"
_SUCCESSOR_LOOK_S = 1.0
_FAREWELL_S = 15.0  # beyond the grace period, for agents to end when the job is over


@dataclass(frozen=True, kw_only=True)
class Additions:
    """What an entry adds to the run of its jobs.

    make_engine    makes the engine that starts the agents of hosts that are other machines; called with the listener to
                   its events. It is closed at the end. None: ssh, unless other agents may join
    finds_hosts    whether this engine is also the discovery of the hosts: then it starts the agents of all of them,
                   also of this machine
    make_sink      makes the sink of the workers' output, on the event loop. It is closed at the end
    listeners      called with each event, before all others
    reason_to_end  returns for an event why the job must end, with grace; empty: it need not
    factory        forks the coordinators, and is closed at the end; None: one is started
    function       the call that travels to all agents, and the receiver of their workers' returns; of jobs of
                   farandole.run(), which need no folder of theirs
    run            runs the job on an event loop
    """

    make_engine: Callable[[Callable[[Event], None]], Engine] | None = None
    finds_hosts: bool = False
    make_sink: Callable[[OutputOptions, TerminalLine | None], OutputSink] = OutputSink
    listeners: tuple[Callable[[Event], None], ...] = ()
    reason_to_end: Callable[[Event], str] | None = None
    factory: CoordinatorFactory | None = None
    function: FunctionJob | None = None
    run: Callable[[Coroutine[Any, Any, Outcome]], Outcome] = asyncio.run


NO_ADDITIONS = Additions()


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What launcher.py has prepared around a job.

    on_event    called with each event of the job
    output      for the sink of the workers' output; line: the one below it on the terminal; None: there is none
    on_summary  called with a summary of the job about once a second; None: none is made
    begun       the beginning of the job's numbers, and the variables of its checkpoints
    state       outlives this launcher; None: its end is the end of the job
    page        serves the live page of the job; None: none is served
    """

    on_event: Callable[[Event], None]
    output: OutputOptions = field(default_factory=OutputOptions)
    line: TerminalLine | None = None
    on_summary: Callable[[JobSummary], None] | None = None
    begun: Beginning = field(default_factory=Beginning)
    state: JobState | None = None
    page: PageProcess | None = None


async def run_job(spec: JobSpec, around: Surroundings, additions: Additions = NO_ADDITIONS) -> Outcome:
    """Run the job until it has ended; none of its processes is left then, whatever was raised. In the main thread the
    first SIGINT, SIGTERM or SIGHUP ends the job with grace, a second SIGINT or SIGTERM at once.

    Raises ConfigError when the coordinator cannot listen, when a host cannot be used or all have fewer slots than the
    requested workers, when the first discovery fails, and when this process may not open as many files as the job
    needs.
    """
    try:
        outcome = await _JobRun(spec, around, additions).run()
        if around.state is not None:
            around.state.end(is_over=True)
        return outcome
    except CoordinatorFailed as error:
        return Outcome(1, str(error))
    finally:
        if around.state is not None:
            around.state.end(is_over=False)


class _JobRun:
    """One job, from the search for its hosts to its end: `await run()`, once."""

    def __init__(self, spec: JobSpec, around: Surroundings, additions: Additions) -> None:
        self._spec, self._around, self._additions, self._config = spec, around, additions, spec.config
        self._remember: Callable[[Event], None] = lambda event: None  # the coordinator's, once there is one
        self._engine = self._make_engine()
        self._source = HostsSource(
            spec.config,
            self._hosts(),
            self._engine is not None,
            self._on_event,
            are_all_others=additions.finds_hosts,
        )
        self._added = {**spec.environment, **around.begun.environment}
        self._command = with_own_python(spec.command)
        self._forks: ForkServerUse = spec.fork_server if spec.config.may_start_workers_again else "off"
        self._tls = load_certificates(self._config.tls)
        self._job_id = secrets.token_hex(8)
        self._token = new_token() if spec.joining is None else spec.joining.token
        if around.state is not None:
            self._job_id, self._token = around.state.job_id, around.state.token

    def _make_engine(self) -> Engine | None:
        if self._additions.make_engine is not None:
            return self._additions.make_engine(self._on_event)
        return None if self._spec.joining is not None else SshEngine(self._spec.ssh, self._on_event)

    def _hosts(self) -> tuple[HostSlots, ...] | HostDiscovery | None:
        if self._additions.finds_hosts:
            return cast(HostDiscovery, self._engine)
        return ScriptDiscovery(self._spec.hosts) if isinstance(self._spec.hosts, HostScript) else self._spec.hosts

    async def run(self) -> Outcome:
        """Run the job to its end."""
        spec, around, joining = self._spec, self._around, self._spec.joining
        first = await self._source.first()
        here = sum(each.slots for each in first if each.name not in self._source.others)
        reserve_descriptors(max(here, self._config.max_np or 0))
        self._sink = self._additions.make_sink(around.output, around.line)
        try:
            self._coordinator = await self._start_coordinator()
            self._remember = self._coordinator.remember
            if joining is not None:
                address, file = str(self._coordinator.address), str(joining.job_file or "")
                self._on_event(AgentsAwaited(address, joining.token_file, file))
            self._environment = {**inherited_environment(), **self._added}
            if here:
                workers = self._config.most_workers_in(here)
                self._environment = share_cores(self._environment, workers, self._on_event)
            self._fleet = self._make_fleet()
            job_file = self._job_file()
            with (
                shared(None if joining is None else joining.job_file, job_file),
                contextlib.nullcontext() if around.page is None else around.page.serve(job_file),
                _ending_on_signals(self._coordinator, self._fleet, self._on_event, self._config.grace_s),
                announced(job_file) as problem,
            ):
                if problem:
                    self._on_event(JobNotAnnounced(problem))
                if spec.order_of_hosts is not None:
                    self._coordinator.offer(spec.order_of_hosts, may_change=False)
                return await self._serve()
        finally:
            self._sink.close()

    # The coordinator, and where it can be reached -----------------------------------------------------------

    async def _start_coordinator(self) -> Coordinator | SupervisedCoordinator:
        spec, state, additions = self._spec, self._around.state, self._additions
        others = self._source.others
        is_open = spec.joining is not None or bool(others) or not self._source.are_fixed
        may_be_reached = bool(others) or (spec.joining is not None and spec.joining.job_file is not None)
        listen_on: tuple[str, ...] = (_LOOPBACK,)
        if spec.host:
            listen_on = (spec.host,)
        elif may_be_reached:
            listen_on = await self._own_addresses() or listen_on
        welcome = None
        if is_open:
            environment = {**carried_environment(), **self._added}
            welcome = self._facts(spec.command, environment, os.getcwd(), spec.patience_s)
        output = RemoteOutput(self._sink)
        setup = CoordinatorSetup(
            self._config,
            self._token,
            self._job_id,
            listen_on,
            spec.port,
            self._around.begun.origin,
            welcome,
            additions.finds_hosts,
            self._first_hosts(),
            launcher="" if state is None else state.launcher,
            number=0 if state is None else state.number,
            lost="" if state is None else state.lost,
        )
        coordinator: Coordinator | SupervisedCoordinator
        if additions.function is None:
            copies = None
            if state is not None and state.write_copy is not None:
                copies = StateCopies(state.write_copy, spec.patience_s, self._on_event)
            coordinator = SupervisedCoordinator(
                setup,
                on_event=self._on_decision,
                on_output=output,
                factory=additions.factory,
                journal=None if state is None else state.journal_files,
                copies=copies,
                on_summary=self._around.on_summary,
            )
        else:  # the calling program waits for the results: its end is the end of the job
            coordinator = Coordinator(setup, on_event=self._on_decision, on_output=output, function=additions.function)
        await coordinator.start()
        return coordinator

    def _first_hosts(self) -> dict[str, int]:
        """Return the hosts of the agents that this process starts at once, with their slots. Of hosts that are
        discovered, only the order counts: a later discovery may miss them."""
        hosts = () if self._additions.finds_hosts else self._source.hosts
        return {each.name: each.slots if self._source.are_fixed else 0 for each in hosts}

    def _facts(
        self, command: tuple[str, ...], environment: dict[str, str], folder: str, patience_s: float, store_port: int = 0
    ) -> Welcome:
        """Return the facts of the job for agents."""
        return Welcome(
            job_id=self._job_id,
            command=command,
            folder=folder,
            environment=environment,
            detection_budget_s=self._config.detection_budget_s,
            grace_s=self._config.grace_s,
            is_elastic=self._config.may_change,
            fork_server=self._forks,
            store_port=store_port,
            max_restarts=self._config.max_restarts or 0,
            needs_folder=self._additions.function is None,
            patience_s=0.0 if self._additions.function is not None else patience_s,
            outlives_silence=self._around.state is not None,
        )

    def _job_file(self) -> JobFile:
        return JobFile(
            self._job_id,
            os.getpid(),
            born(os.getpid()),
            self._coordinator.address,
            self._token,
            tuple(self._command),
            wall_time_s(),
            self._reachable(),
            self._config.tls,
            own_namespace(),
        )

    async def _own_addresses(self) -> tuple[str, ...]:
        return await asyncio.to_thread(addresses_for, tuple(self._source.others), self._spec.interfaces)

    async def _addresses_for_others(self) -> tuple[Address, ...]:
        """Return the addresses at which other machines may reach the coordinator, which listens there then."""
        if not self._spec.host and all(each.host == _LOOPBACK for each in self._coordinator.addresses):
            await self._coordinator.listen(await self._own_addresses())  # the first other machine has come
        return self._reachable()

    def _reachable(self) -> tuple[Address, ...]:
        addresses = self._coordinator.addresses
        outside = tuple(each for each in addresses if self._spec.host or each.host != _LOOPBACK)
        return outside or addresses  # a machine without a network has loopback alone

    # The fleet ---------------------------------------------------------------------------------------------

    def _make_fleet(self) -> Fleet:
        return Fleet(
            HostsEngine(self._make_agent, self._engine, self._source.others, self._addresses_for_others),
            self._order_for,
            on_gone=self._coordinator.agent_gone,
            on_event=self._on_event,
            is_over=lambda: self._coordinator.has_ended,
            must_succeed=self._source.are_fixed or self._additions.finds_hosts,
        )

    def _order_for(self, on: HostSlots) -> AgentOrder:
        return AgentOrder(
            on.name,
            on.slots,
            self._coordinator.addresses,
            self._token,
            folder=self._spec.remote_folder,
            interfaces=self._spec.interfaces,
            preemption=str(self._spec.preemption),
            tls=self._config.tls,
        )

    def _make_agent(self, order: AgentOrder) -> Agent:
        """Return the agent of a host name that is this machine."""
        patience_s = float("inf")  # the launcher ends it
        agent_config = AgentConfig(
            name=order.host,
            host=order.host,
            slots=order.slots,
            coordinator=self._coordinator.address,
            token=self._token,
            job=self._facts(self._command, self._environment, "", patience_s, self._coordinator.store_port),
            error_folder=self._spec.error_folder,
            data_hosts=self._data_hosts(),
            process=secrets.token_hex(8),
            tls=self._tls,
        )
        function = self._additions.function
        call = b"" if function is None else function.call
        return Agent(agent_config, self._sink, self._on_event, call=call)

    def _data_hosts(self) -> tuple[str, ...]:
        """Return the addresses for tensors of this machine's workers; empty: as the agent chooses."""
        if self._spec.interfaces:
            return tuple(own_addresses(self._spec.interfaces))
        if self._engine is not None and not self._source.are_fixed and not self._source.others:
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
        around = self._around
        yield watch_for_notices(self._spec.preemption, self._on_notice, self._on_event)
        if not self._source.are_fixed:
            yield self._follow_hosts()
        if self._spec.pods is not None:
            watch: HostWatch = factory("pod watch")(self._spec.pods, self._on_event)
            yield watch.run(HostReports(self._coordinator.agent_leaves, self._coordinator.agent_gone))
        if around.state is not None and isinstance(self._coordinator, SupervisedCoordinator):
            yield self._watch_for_successor(around.state, self._coordinator)
        if around.on_summary is not None and isinstance(self._coordinator, Coordinator):
            yield self._summarize(self._coordinator, around.on_summary)

    async def _summarize(self, coordinator: Coordinator, on_summary: Callable[[JobSummary], None]) -> None:
        """Pass on what a coordinator of its own process sends to its launcher."""
        while True:
            await asyncio.sleep(SUMMARY_EVERY_S)
            on_summary(coordinator.clients.summary())

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
        if (
            self._additions.finds_hosts or not self._config.takes_agents
        ):  # else the job uses all slots that its agents offer
            self._coordinator.offer({each.name: each.slots for each in hosts}, may_change=not self._source.are_fixed)
        self._fleet.follow(hosts)

    def _on_event(self, event: Event) -> None:
        """Report an event of this process, which the coordinator keeps together with its own."""
        self._around.on_event(event)
        self._remember(event)

    def _on_decision(self, event: Event) -> None:
        reason_to_end = self._additions.reason_to_end
        if isinstance(event, HostDrained | HostUndrained):
            self._fleet.on_decision(event)
        elif isinstance(event, GenerationStarted) and event.bootstrap:
            self._fleet.training_begins()
        self._around.on_event(event)
        if reason_to_end is not None and (reason := reason_to_end(event)):
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
