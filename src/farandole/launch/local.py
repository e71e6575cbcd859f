"""A job on this machine: coordinator and agents in one process, on one event loop. cli.py runs it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from farandole.agent.agent import Agent, AgentConfig
from farandole.agent.host_resources import reserve_descriptors, share_cores, workers_at_most
from farandole.agent.remote_output import RemoteOutput
from farandole.config import ForkServerUse, JobConfig
from farandole.coordinator.server import Coordinator, Outcome
from farandole.env import carried_environment, inherited_environment
from farandole.errors import ConfigError
from farandole.events import AgentsAwaited, Event, JobNotAnnounced, StopAsked
from farandole.launch.discovery import HostDiscovery
from farandole.launch.ending_signals import ending_signals
from farandole.launch.host_list import HostSlots
from farandole.launch.job_files import announced
from farandole.launch.joining import Joining
from farandole.launch.local_agents import HostWatch, LocalAgents, refuse_other_machines
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

    sink = OutputSink(output)
    forks: ForkServerUse = fork_server if config.may_change else "off"
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
