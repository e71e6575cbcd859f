"""A job on this machine: coordinator and agent in one process, on one event loop. cli.py runs it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence

from farandole.authentication import new_token
from farandole.config import JobConfig
from farandole.coordinator.server import Coordinator, Outcome
from farandole.env import inherited_environment
from farandole.events import Event
from farandole.launch.agent import Agent, AgentConfig
from farandole.launch.discovery import HostDiscovery
from farandole.launch.hosts import HostSlots
from farandole.launch.output import OutputOptions, OutputSink


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
) -> Outcome:
    """Run `command` as the job's workers until the job has ended; nothing of it is left then, whatever was
    raised. The first SIGINT or SIGTERM ends the job with grace, the second at once.

    host, port  where the coordinator listens; port 0 lets the system choose.
    Raises ConfigError when the coordinator cannot listen there.
    """
    job_id, token = secrets.token_hex(8), new_token()
    coordinator = Coordinator(config, token, job_id=job_id, host=host, port=port, on_event=on_event)
    await coordinator.start()
    sink = OutputSink(output)
    agent_config = AgentConfig(
        name="local",
        host="localhost",
        slots=config.max_np or config.num_proc,
        coordinator=coordinator.address,
        job_id=job_id,
        token=token,
        command=command,
        environment=inherited_environment(),
        detection_budget_s=config.detection_budget_s,
        grace_s=config.grace_s,
    )
    agent = Agent(agent_config, sink, on_event)
    try:
        with _ending_on_signals(coordinator, agent):
            return await _run_both(coordinator, agent)
    finally:
        sink.close()


async def _run_both(coordinator: Coordinator, agent: Agent) -> Outcome:
    serving, working = asyncio.create_task(coordinator.run()), asyncio.create_task(agent.run())
    try:
        outcome, _ = await asyncio.gather(serving, working)
        return outcome
    finally:
        for task in (serving, working):
            task.cancel()
        await asyncio.wait((serving, working))


@contextlib.contextmanager
def _ending_on_signals(coordinator: Coordinator, agent: Agent) -> Iterator[None]:
    asked = False

    def end(number: signal.Signals) -> None:
        nonlocal asked
        coordinator.request_stop(now=asked, reason=f"{number.name} was received")
        if asked:
            agent.kill_workers()
        asked = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end, number)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
