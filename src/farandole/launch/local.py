"""A job on this machine: coordinator and agents in one process, on one event loop. cli.py runs it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from farandole.agent.agent import Agent, AgentConfig, EndOfService
from farandole.agent.host_resources import reserve_descriptors, share_cores, workers_at_most
from farandole.agent.remote_agent import RemoteOutput
from farandole.checkpoint.folder import JobLock, begin_job
from farandole.checkpoint.store import LocalStore
from farandole.config import ForkServerUse, JobConfig
from farandole.coordinator.server import Coordinator, Outcome
from farandole.env import CheckpointEnv, carried_environment, environment_of, inherited_environment
from farandole.errors import ConfigError
from farandole.events import (
    AgentsAwaited,
    Event,
    GenerationStarted,
    HostDiscoveryFailed,
    HostDrained,
    HostRefused,
    HostUndrained,
    JobNotAnnounced,
    StateLost,
    StopAsked,
)
from farandole.launch.discovery import DiscoveryFailed, HostDiscovery
from farandole.launch.ending_signals import ending_signals
from farandole.launch.host_list import HostSlots, is_this_machine
from farandole.launch.job_files import announced
from farandole.launch.joining import Joining
from farandole.launch.output import OutputOptions, OutputSink
from farandole.membership import Origin
from farandole.wire.authentication import new_token
from farandole.wire.messages import Welcome


async def run_local(
    config: JobConfig,
    command: Sequence[str],
    *,
    hosts: tuple[HostSlots, ...] | HostDiscovery | None = None,
    host: str,
    port: int,
    output: OutputOptions,
    on_event: Callable[[Event], None],
    extra_environment: Mapping[str, str] | None = None,
    origin: Origin | None = None,
    joining: Joining | None = None,
    fork_server: ForkServerUse = "off",
    sink: OutputSink | None = None,
    error_folder: str = "",
    order_of_hosts: Mapping[str, int] | None = None,
) -> Outcome:
    """Run `command` as the job's workers until the job has ended; none of its processes is left then, whatever was
    raised. In the main thread the first SIGINT, SIGTERM or SIGHUP ends the job with grace, a second SIGINT or SIGTERM
    at once.

    hosts              where workers run, in the order of their ranks: each name is a host of its own, and all of
                       them must refer to this machine. Or a repeated discovery. None: localhost, with as many slots as
                       the job may ever need.
    host, port         the address of the coordinator; port 0 lets the system choose
    extra_environment  variables of the workers in addition to those of this process
    origin             the beginning of the job's numbers; given when it writes checkpoints
    joining            the other agents that may offer slots; given when config.takes_agents
    fork_server        whether replacements are forked by a process that has imported torch. While it makes one, this
                       process becomes the parent of its descendants' orphans
    sink               takes the workers' output instead of one that is made of `output`; it is closed at the end
    order_of_hosts     all hosts that agents may offer, with their slots, in the order of their ranks; None: any may
                       join, in any order
    error_folder       the folder for the workers' error files on this machine; empty: they are removed with the job

    Raises ConfigError when the coordinator cannot listen there, when hosts are other machines or have fewer slots than
    the requested workers, when the first discovery fails, and when this process may not open as many files as the job
    needs.
    """
    watch: HostWatch | None = None
    if hosts is None or isinstance(hosts, tuple):
        first = await _fixed_hosts(config, hosts)
    else:
        watch = HostWatch(hosts, on_event)
        first = await watch.first()
    slots = sum(each.slots for each in first)
    reserve_descriptors(max(slots, config.max_np or 0))
    job_id, token = secrets.token_hex(8), new_token() if joining is None else joining.token

    def on_decision(event: Event) -> None:
        agents.on_event(event)
        on_event(event)

    sink = OutputSink(output) if sink is None else sink
    forks: ForkServerUse = fork_server if config.may_start_workers_again else "off"
    coordinator = Coordinator(
        config,
        token,
        job_id=job_id,
        host=host,
        port=port,
        on_event=on_decision,
        origin=origin,
        welcome=None if joining is None else _welcome(config, command, job_id, extra_environment, forks),
        on_output=RemoteOutput(sink),
    )
    try:
        await coordinator.start()
    except ConfigError:
        sink.close()
        raise
    if joining is not None:
        on_event(AgentsAwaited(str(coordinator.address), joining.token_file))
    environment = {**inherited_environment(), **(extra_environment or {})}
    if slots:
        environment = share_cores(environment, workers_at_most(config, slots), on_event)

    def make_agent(on: HostSlots) -> Agent:
        agent_config = AgentConfig(
            name=on.name,
            host=on.name,
            slots=on.slots,
            coordinator=coordinator.address,
            job_id=job_id,
            token=token,
            command=command,
            environment=environment,
            detection_budget_s=config.detection_budget_s,
            grace_s=config.grace_s,
            is_elastic=config.may_change,
            fork_server=forks,
            store_port=coordinator.store_port,
            max_restarts=config.max_restarts or 0,
            error_folder=error_folder,
        )
        return Agent(agent_config, sink, on_event)

    agents = LocalAgents(make_agent, is_over=lambda: coordinator.has_ended)
    try:
        with (
            _ending_on_signals(coordinator, agents, on_event, config.grace_s),
            announced(job_id, coordinator.address, token, command) as problem,
        ):
            if problem:
                on_event(JobNotAnnounced(problem))
            if order_of_hosts is not None:
                coordinator.offer(order_of_hosts, may_change=False)
            return await _run_all(coordinator, agents, first, watch, config.takes_agents)
    finally:
        sink.close()


def _welcome(
    config: JobConfig,
    command: Sequence[str],
    job_id: str,
    extra_environment: Mapping[str, str] | None,
    fork_server: ForkServerUse,
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
    )


async def _fixed_hosts(config: JobConfig, hosts: tuple[HostSlots, ...] | None) -> tuple[HostSlots, ...]:
    if hosts is None:
        return (HostSlots("localhost", (config.max_np or config.num_proc) + config.spares),)
    slots = sum(each.slots for each in hosts)
    if slots < config.num_proc and not config.takes_agents:
        named = ", ".join(map(str, hosts)) or "no hosts"
        raise ConfigError(f"-np {config.num_proc} is above the {slots} slots of {named}")
    await asyncio.to_thread(refuse_other_machines, hosts)
    return hosts


async def _run_all(
    coordinator: Coordinator,
    agents: LocalAgents,
    first: tuple[HostSlots, ...],
    watch: HostWatch | None,
    takes_agents: bool,
) -> Outcome:
    def on_hosts(hosts: tuple[HostSlots, ...]) -> None:
        if not takes_agents:  # else the job uses all slots that its agents offer
            coordinator.offer({each.name: each.slots for each in hosts}, may_change=watch is not None)
        agents.follow(hosts)

    on_hosts(first)
    serving = asyncio.create_task(coordinator.run())
    tasks = {serving} if watch is None else {serving, asyncio.create_task(watch.follow(on_hosts))}
    try:
        done, _ = await asyncio.wait({*tasks, agents.broken}, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()
        await agents.gone()
        return serving.result()
    except asyncio.CancelledError:
        # Announced to all, as after a signal: an agent that loses its coordinator has to treat that as a fault.
        coordinator.request_stop(now=False, reason="the launcher was interrupted")
        await agents.gone()
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await agents.close()


@contextlib.contextmanager
def _ending_on_signals(
    coordinator: Coordinator, agents: LocalAgents, on_event: Callable[[Event], None], grace_s: float
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
            agents.kill_workers()

    with ending_signals(end):
        yield


# The agents of a job on this machine: one for each host name ----------------------------------------------------------
#
# All names refer to this machine.

_AGAIN_S = 1.0  # until an agent that ended without being dismissed is started again


def refuse_other_machines(hosts: Iterable[HostSlots]) -> None:
    """Raise ConfigError when a host is not this machine. May take seconds, for the name service."""
    others = [host.name for host in hosts if not is_this_machine(host.name)]
    if others:
        raise ConfigError(why_refused(", ".join(others)))


def why_refused(name: str) -> str:
    """Return the message about a host that is another machine."""
    return (
        f"host {name} is another machine, on which this command cannot start workers: start the job with --host "
        "ADDRESS and --token-file FILE, and run on that machine: farandole agent --join ADDRESS:PORT --slots N "
        "--token-file COPY"
    )


class LocalAgents:
    """The agents of a job, used on one event loop.

    `make_agent` makes the agent of one host. `is_over` returns whether the job has ended.
    """

    def __init__(self, make_agent: Callable[[HostSlots], Agent], is_over: Callable[[], bool]) -> None:
        self._make_agent, self._is_over = make_agent, is_over
        self._wanted: dict[str, HostSlots] = {}
        self._agents: dict[str, Agent] = {}
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._drained: set[str] = set()
        self._wanted_again: set[str] = set()
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with the error when an agent itself has failed."""

    def follow(self, hosts: Iterable[HostSlots]) -> None:
        """Start an agent for each of these hosts that has none. Agents of other hosts end once they are dismissed. A
        host that was drained stays so until it has been removed."""
        self._wanted = {host.name: host for host in hosts}
        self._drained &= self._wanted.keys()
        self._start_missing()

    def on_event(self, event: Event) -> None:
        """Follow an event of the coordinator: a host that is undrained gets an agent again."""
        if isinstance(event, HostDrained):
            self._wanted_again.discard(event.host)
        elif isinstance(event, HostUndrained):
            self._drained.discard(event.host)
            self._wanted_again.add(event.host)  # for an agent that is about to end
            self._start_missing()

    def kill_workers(self) -> None:
        """End all workers at once, also those that are in their grace period."""
        for agent in self._agents.values():
            agent.kill_workers()

    async def gone(self) -> None:
        """Wait, when the job is over, until all agents have ended, which they do when they are told."""
        while self._lives:
            await asyncio.wait([self.broken, *self._lives.values()], return_when=asyncio.FIRST_COMPLETED)
            if self.broken.done():
                self.broken.result()

    async def close(self) -> None:
        """End all agents; none is left when this returns."""
        lives = list(self._lives.values())
        for life in lives:
            life.cancel()
        await asyncio.gather(*lives, return_exceptions=True)
        self.broken.cancel()

    def _start_missing(self) -> None:
        for name in self._wanted:
            if name not in self._lives and name not in self._drained:
                self._lives[name] = asyncio.create_task(self._live(name))
                self._lives[name].add_done_callback(self._on_life_over)

    async def _live(self, name: str) -> None:
        """Run the agents of one host, one after the other."""
        try:
            while name in self._wanted and not self._is_over():
                self._agents[name] = self._make_agent(self._wanted[name])
                service = await self._agents[name].run()
                if service.end is EndOfService.DRAINED and name not in self._wanted_again:
                    self._drained.add(name)
                    return
                if name in self._wanted and not self._is_over():
                    await asyncio.sleep(_AGAIN_S)
        finally:
            self._agents.pop(name, None)
            del self._lives[name]

    def _on_life_over(self, life: asyncio.Task[None]) -> None:
        if not life.cancelled() and (error := life.exception()) is not None and not self.broken.done():
            self.broken.set_exception(error)


# Repeated discovery of hosts, which reports when they have changed ----------------------------------------------------


class HostWatch:
    """The watch over a discovery: `await first()`, then `await follow(on_hosts)`."""

    def __init__(self, discovery: HostDiscovery, on_event: Callable[[Event], None]) -> None:
        self._discovery, self._on_event = discovery, on_event
        self._hosts: tuple[HostSlots, ...] = ()
        self._refused: set[str] = set()
        self._last_failure = ""

    async def first(self) -> tuple[HostSlots, ...]:
        """Return the current hosts; an empty list is allowed. Raises ConfigError when they cannot be determined, or
        when one cannot be used: at the start the user is present to correct it."""
        try:
            self._hosts = await self._discovery.find()
        except DiscoveryFailed as error:
            raise ConfigError(str(error)) from error
        await asyncio.to_thread(refuse_other_machines, self._hosts)
        return self._hosts

    async def follow(self, on_hosts: Callable[[tuple[HostSlots, ...]], None]) -> None:
        """Call `on_hosts` with all hosts whenever they have changed; for ever. A failure is reported, and the discovery
        repeated: a training job does not end because of it."""
        while True:
            await asyncio.sleep(self._discovery.period_s)
            try:
                hosts = await self._usable(await self._discovery.find())
            except DiscoveryFailed as error:
                if str(error) != self._last_failure:
                    self._last_failure = str(error)
                    self._on_event(HostDiscoveryFailed(self._last_failure))
                continue
            self._last_failure = ""
            if set(hosts) != set(self._hosts):
                self._hosts = hosts
                on_hosts(hosts)

    async def _usable(self, hosts: tuple[HostSlots, ...]) -> tuple[HostSlots, ...]:
        usable = []
        for host in hosts:
            if await asyncio.to_thread(is_this_machine, host.name):
                usable.append(host)
            elif host.name not in self._refused:
                self._refused.add(host.name)
                self._on_event(HostRefused(host.name, why_refused(host.name)))
        return tuple(usable)


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
