"""Agents of hosts that are names of this machine: who is drained is not started again."""

from __future__ import annotations

import asyncio
import os
import sys

from farandole.agent.agent import Agent, AgentConfig
from farandole.config import JobConfig
from farandole.coordinator.server import Coordinator
from farandole.events import AgentJoined, HostDrained
from farandole.launch.host_list import HostSlots
from farandole.launch.local import LocalAgents
from farandole.launch.output import OutputOptions, OutputSink
from farandole.wire.authentication import new_token
from tests.support.waiting import EventLog, run


def test_a_drained_host_gets_no_other_agent_before_it_has_been_gone() -> None:
    async def test() -> None:
        token, events = new_token(), EventLog()
        coordinator = Coordinator(JobConfig(num_proc=1), token, job_id="job", on_event=events)
        await coordinator.start()
        serving = asyncio.create_task(coordinator.run())
        sink = OutputSink(OutputOptions())
        made: list[Agent] = []

        def make_agent(on: HostSlots) -> Agent:
            config = AgentConfig(
                name=on.name,
                host=on.name,
                slots=on.slots,
                coordinator=coordinator.address,
                job_id="job",
                token=token,
                command=[sys.executable, "-c", "import time; time.sleep(60)"],
                environment=dict(os.environ),
                detection_budget_s=3.0,
                grace_s=0.1,
            )
            made.append(Agent(config, sink, events))
            return made[-1]

        agents = LocalAgents(make_agent, is_over=lambda: coordinator.has_ended)
        try:
            for _ in range(2):
                joined = asyncio.create_task(events.next(AgentJoined))
                await asyncio.sleep(0)
                agents.follow([HostSlots("a", 1)])
                await joined
                made[-1].leave("a test")
                await agents.gone()
                agents.follow([HostSlots("a", 1)])
                await agents.gone()  # at once: none was started
                agents.follow([])
            assert len(made) == len(events.of(HostDrained)) == 2
        finally:
            await agents.close()
            serving.cancel()
            await asyncio.wait([serving])
            sink.close()

    run(test())
