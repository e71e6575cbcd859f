"""A job: the coordinator, and the fleet of its agents, on one event loop. cli.py runs it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from farandole.agent.agent import Agent, AgentConfig
from farandole.agent.host_resources import reserve_descriptors, share_cores, workers_at_most
from farandole.agent.network_addresses import addresses_for, own_addresses
from farandole.agent.preemption import Notice, watch_for_notices
from farandole.agent.remote_agent import RemoteOutput, with_own_python
from farandole.checkpoint.folder import JobLock, begin_job
from farandole.checkpoint.store import LocalStore
from farandole.config import ForkServerUse, JobConfig, Preemption
from farandole.coordinator.server import Coordinator, Outcome
from farandole.engines.discovery import HostDiscovery, HostsOver, HostsSource
from farandole.engines.engine_interface import AgentOrder, Engine, HostReports, HostWatch
from farandole.engines.fleet import Fleet
from farandole.engines.host_list import HostSlots
from farandole.engines.local_engine import HostsEngine, LocalEngine
from farandole.env import CheckpointEnv, carried_environment, environment_of, inherited_environment
from farandole.errors import ConfigError
from farandole.events import (
    AgentsAwaited,
    Event,
    GenerationStarted,
    HostDrained,
    HostUndrained,
    JobNotAnnounced,
    StateLost,
    StopAsked,
)
from farandole.launch.ending_signals import ending_signals
from farandole.launch.job_files import JobFile, announced, born, shared
from farandole.launch.joining import Joining
from farandole.launch.output import OutputOptions, OutputSink
from farandole.machine import wall_time_s
from farandole.membership import Address, Origin
from farandole.wire.authentication import new_token
from farandole.wire.function_call import FunctionJob
from farandole.wire.messages import Welcome

Observer: TypeAlias = Callable[[], Coroutine[None, None, None]]
"""Runs until it is cancelled."""


async def run_job(
    config: JobConfig,
    command: Sequence[str],
    *,
    hosts: tuple[HostSlots, ...] | HostDiscovery | None = None,
    engine: Engine | None = None,
    interfaces: Sequence[str] = (),
    remote_folder: str = "",
    host: str = "",
    port: int = 0,
    output: OutputOptions,
    on_event: Callable[[Event], None],
    extra_environment: Mapping[str, str] | None = None,
    origin: Origin | None = None,
    joining: Joining | None = None,
    fork_server: ForkServerUse = "off",
    sink: OutputSink | None = None,
    error_folder: str = "",
    order_of_hosts: Mapping[str, int] | None = None,
    watch: HostWatch | None = None,
    preemption: Preemption | None = None,
    reason_to_end: Callable[[Event], str] | None = None,
    function: FunctionJob | None = None,
) -> Outcome:
    """Run `command` as the job's workers until the job has ended; none of its processes is left then, whatever was
    raised. An empty first word of the command stands for the Python of each agent. In the main thread the first SIGINT,
    SIGTERM or SIGHUP ends the job with grace, a second SIGINT or SIGTERM at once.

    hosts              where workers run, in the order of their ranks: each name is a host of its own. Or a repeated
                       discovery. None: localhost, with as many slots as the job may ever need.
    engine             starts the agents of hosts that are other machines; it is closed at the end. None: such hosts are
                       refused. An engine that is also `hosts` starts the agents of all of them, also of this machine
    interfaces         the network interfaces to be used between hosts; empty: those that lead to the other hosts
    remote_folder      the working directory of workers on other machines; empty: the path of this process's own
    host, port         the address of the coordinator. Empty: loopback, or where hosts are other machines the addresses
                       at which they may reach it; port 0 lets the system choose
    extra_environment  variables of the workers in addition to those of this process
    origin             the beginning of the job's numbers; given when it writes checkpoints
    joining            the other agents that may offer slots; given when config.takes_agents
    fork_server        whether replacements are forked by a process that has imported torch. While it makes one, this
                       process becomes the parent of its descendants' orphans
    sink               takes the workers' output instead of one that is made of `output`; it is closed at the end
    order_of_hosts     all hosts that agents may offer, with their slots, in the order of their ranks; None: any may
                       join, in any order
    watch              observes hosts from which agents join by themselves; None: only their heartbeats count
    preemption         where preemption notices are looked for, on this machine and by the agents that are started on
                       others; None: nowhere. One of this machine ends the job as SIGTERM does: the coordinator goes
                       with the machine, and a checkpoint is still possible
    reason_to_end      returns for an event why the job must end, with grace; empty: it need not
    function           the call that travels to all agents, and the receiver of their workers' returns; of jobs of
                       farandole.run(), which need no folder of theirs
    error_folder       the folder for the workers' error files on this machine; empty: they are removed with the job

    Raises ConfigError when the coordinator cannot listen there, when a host cannot be used or all have fewer slots than
    the requested workers, when the first discovery fails, and when this process may not open as many files as the job
    needs.
    """
    is_of_engine = engine is not None and id(hosts) == id(engine)
    hosts_source = HostsSource(config, hosts, engine is not None, on_event, are_all_others=is_of_engine)
    first = await hosts_source.first()
    here = sum(each.slots for each in first if each.name not in hosts_source.others)
    reserve_descriptors(max(here, config.max_np or 0))
    # Without line ends: engines pass it to their agents as a line.
    job_id, token = secrets.token_hex(8), new_token() if joining is None else joining.token

    def on_decision(event: Event) -> None:
        if isinstance(event, HostDrained | HostUndrained):
            fleet.on_decision(event)
        elif isinstance(event, GenerationStarted) and event.bootstrap:
            fleet.training_begins()
        on_event(event)
        if reason_to_end is not None and (reason := reason_to_end(event)):
            # Not at once: an event comes in the middle of a decision.
            asyncio.get_running_loop().call_soon(coordinator.request_stop, False, reason)

    async def own_addresses_for(others: Iterable[str]) -> tuple[str, ...]:
        return await asyncio.to_thread(addresses_for, tuple(others), interfaces)

    own_command = with_own_python(command)
    sink = OutputSink(output) if sink is None else sink
    forks: ForkServerUse = fork_server if config.may_start_workers_again else "off"
    is_open = joining is not None or bool(hosts_source.others) or not hosts_source.are_fixed
    job_file = None if joining is None else joining.job_file
    may_be_reached = bool(hosts_source.others) or job_file is not None
    try:
        listen_on = (host,) if host else await own_addresses_for(hosts_source.others) if may_be_reached else ()
        coordinator = Coordinator(
            config,
            token,
            job_id=job_id,
            hosts=listen_on or (_LOOPBACK,),
            port=port,
            on_event=on_decision,
            origin=origin,
            welcome=_welcome(config, command, job_id, extra_environment, forks, function) if is_open else None,
            on_output=RemoteOutput(sink),
            offers_joined=is_of_engine,
            function=function,
        )
        await coordinator.start()
    except ConfigError:
        sink.close()
        raise
    if joining is not None:
        on_event(AgentsAwaited(str(coordinator.address), joining.token_file, str(job_file or "")))
    environment = {**inherited_environment(), **(extra_environment or {})}
    if here:
        environment = share_cores(environment, workers_at_most(config, here), on_event)

    def order_for(on: HostSlots) -> AgentOrder:
        return AgentOrder(
            on.name,
            on.slots,
            coordinator.addresses,
            token,
            folder=remote_folder,
            interfaces=tuple(interfaces),
            preemption=str(preemption or Preemption()),
        )

    def make_agent(order: AgentOrder) -> Agent:
        agent_config = AgentConfig(
            name=order.host,
            host=order.host,
            slots=order.slots,
            coordinator=coordinator.address,
            job_id=job_id,
            token=token,
            command=own_command,
            environment=environment,
            detection_budget_s=config.detection_budget_s,
            grace_s=config.grace_s,
            is_elastic=config.may_change,
            fork_server=forks,
            store_port=coordinator.store_port,
            max_restarts=config.max_restarts or 0,
            error_folder=error_folder,
            data_host=own_addresses(interfaces)[0] if interfaces else "",
        )
        return Agent(agent_config, sink, on_event, call=b"" if function is None else function.call)

    async def addresses_of_coordinator(others: Iterable[str]) -> tuple[Address, ...]:
        if not host and all(each.host == _LOOPBACK for each in coordinator.addresses):
            await coordinator.listen(await own_addresses_for(others))  # the first other machine has come
        return reachable()

    def reachable() -> tuple[Address, ...]:
        outside = tuple(each for each in coordinator.addresses if host or each.host != _LOOPBACK)
        return outside or coordinator.addresses  # a machine without a network has loopback alone

    def on_notice(notice: Notice) -> None:
        if notice.must_leave:
            coordinator.request_stop(now=False, reason=notice.reason)

    observers: list[Observer] = []
    if watch is not None:
        observers.append(partial(watch.run, HostReports(coordinator.agent_leaves, coordinator.agent_gone)))
    if preemption is not None:
        observers.append(partial(watch_for_notices, preemption, on_notice, on_event))
    fleet = Fleet(
        HostsEngine(LocalEngine(make_agent), engine, hosts_source.others, addresses_of_coordinator),
        order_for,
        on_gone=coordinator.agent_gone,
        on_event=on_event,
        is_over=lambda: coordinator.has_ended,
        must_succeed=hosts_source.are_fixed or is_of_engine,
    )
    started_s = wall_time_s()
    file = JobFile(
        job_id, os.getpid(), born(os.getpid()), coordinator.address, token, tuple(command), started_s, reachable()
    )
    try:
        with (
            shared(job_file, file),
            _ending_on_signals(coordinator, fleet, on_event, config.grace_s),
            announced(job_id, coordinator.address, token, own_command) as problem,
        ):
            if problem:
                on_event(JobNotAnnounced(problem))
            if order_of_hosts is not None:
                coordinator.offer(order_of_hosts, may_change=False)
            # Else the job uses all slots that its agents offer.
            offers = is_of_engine or not config.takes_agents
            return await _run_all(coordinator, fleet, hosts_source, config, offers, observers)
    finally:
        sink.close()


_LOOPBACK = "127.0.0.1"


def _welcome(
    config: JobConfig,
    command: Sequence[str],
    job_id: str,
    extra_environment: Mapping[str, str] | None,
    fork_server: ForkServerUse,
    function: FunctionJob | None,
) -> Welcome:
    return Welcome(
        job_id=job_id,
        command=tuple(command),
        folder=os.getcwd(),
        environment={**carried_environment(), **(extra_environment or {})},
        detection_budget_s=config.detection_budget_s,
        grace_s=config.grace_s,
        is_elastic=config.may_change,
        fork_server=fork_server,
        max_restarts=config.max_restarts or 0,
        needs_folder=function is None,
    )


_FAREWELL_S = 15.0  # beyond the grace period, for agents to end when the job is over


async def _run_all(
    coordinator: Coordinator,
    fleet: Fleet,
    source: HostsSource,
    config: JobConfig,
    offers: bool,
    observers: Iterable[Observer],
) -> Outcome:
    def on_hosts(hosts: tuple[HostSlots, ...]) -> None:
        if offers:
            coordinator.offer({each.name: each.slots for each in hosts}, may_change=not source.are_fixed)
        fleet.follow(hosts)

    async def follow_hosts() -> None:
        try:
            await source.follow(on_hosts)
        except HostsOver as error:
            coordinator.request_stop(now=False, reason=str(error))
            await asyncio.wait([serving])

    on_hosts(source.hosts)
    serving = asyncio.create_task(coordinator.run())
    tasks: set[asyncio.Task[Outcome] | asyncio.Task[None]] = {serving}
    if not source.are_fixed:
        tasks.add(asyncio.create_task(follow_hosts()))
    tasks |= {asyncio.create_task(observe()) for observe in observers}
    try:
        done, _ = await asyncio.wait({*tasks, fleet.broken}, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()
        await fleet.gone(config.grace_s + _FAREWELL_S)
        return serving.result()
    except asyncio.CancelledError:
        # Announced to all, as after a signal: an agent that loses its coordinator has to treat that as a fault.
        coordinator.request_stop(now=False, reason="the launcher was interrupted")
        await fleet.gone(config.grace_s + _FAREWELL_S)
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await fleet.close()


@contextlib.contextmanager
def _ending_on_signals(
    coordinator: Coordinator, fleet: Fleet, on_event: Callable[[Event], None], grace_s: float
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


# The place of a job's checkpoints, from the side of the launcher: locked for as long as the job runs, and kept up to
# date.


_CLOSE_S = 5.0


@dataclass(frozen=True)
class Beginning:
    """The beginning of a job. Without checkpoints it begins anew, and nothing is recorded.

    origin       the beginning of its numbers
    environment  additional variables of its workers
    notes        notes for the user
    watch        called with all events
    """

    origin: Origin | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    watch: Callable[[Event], None] = lambda event: None


@contextlib.contextmanager
def beginning(settings: CheckpointEnv | None) -> Iterator[Beginning]:
    """Lock the place for as long as the job runs. Raises the errors of begin_job()."""
    if settings is None:
        yield Beginning()
        return
    begun = begin_job(settings)
    counting = _NumberRecorder(begun.lock, begun.origin)
    try:
        yield Beginning(begun.origin, environment_of(begun.settings), begun.notes, counting.watch)
    finally:
        counting.close()
        begun.lock.close()


class _NumberRecorder:
    """Records each generation and each run id. A full disk must not end the job: the manifests count, too.

    In a folder it writes at once. For an object store, which may take seconds, it writes in a thread, the newest
    numbers only.
    """

    def __init__(self, lock: JobLock, origin: Origin) -> None:
        self._lock = lock
        self._run_id, self._generation = origin.run_id, origin.generation
        self._changed = threading.Condition()
        self._is_behind = self._is_closing = False
        self._thread: threading.Thread | None = None
        if not isinstance(lock.store, LocalStore):
            self._thread = threading.Thread(target=self._run, name="farandole-counting", daemon=True)
            self._thread.start()

    def watch(self, event: Event) -> None:
        with self._changed:
            if isinstance(event, StateLost):
                self._run_id = event.run_id
            elif isinstance(event, GenerationStarted):
                self._generation = event.number
            else:
                return
            self._is_behind = True
            self._changed.notify()
        if self._thread is None:
            self._write()

    def close(self) -> None:
        """Write the pending numbers, if that takes no longer than the time limit of a store, and stop."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_behind or self._is_closing)
                if not self._is_behind:
                    return
                self._is_behind = False
            self._write()

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            self._lock.count(self._run_id, self._generation)


# Listeners of the job's events ----------------------------------------------------------------------------------------


def in_turn(*listeners: Callable[[Event], None] | None) -> Callable[[Event], None]:
    """Return a listener that hands each event to all `listeners`, in this order; None is left out."""
    present = [each for each in listeners if each is not None]

    def on_event(event: Event) -> None:
        for listener in present:
            listener(event)

    return on_event
