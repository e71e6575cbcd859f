"""The engine of a job's hosts: an agent of this machine runs in this process, and others are left to another engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace

from farandole.base.membership import Address
from farandole.errors import ConfigError
from farandole.job.agent.agent import Agent
from farandole.job.engines.engine_interface import AgentExit, AgentOrder, Engine, RunningAgent, StartFailed


class LocalAgent:
    """An agent that runs on this event loop."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._life = asyncio.create_task(agent.run())

    async def wait(self) -> AgentExit:
        """Wait until the agent has ended. Raises its internal errors."""
        await asyncio.shield(self._life)
        return AgentExit()

    def kill_workers(self) -> None:
        """End the workers at once."""
        self._agent.kill_workers()

    async def close(self) -> None:
        """End the agent."""
        self._life.cancel()
        await asyncio.gather(self._life, return_exceptions=True)


class HostsEngine:
    """Starts agents of this machine in this process, and those of others by another engine.

    make_agent     makes the agent of this machine for an order
    other_hosts    the names of other machines; it may change
    addresses_for  returns the addresses at which other machines may reach the coordinator, which listens there then
    """

    def __init__(
        self,
        make_agent: Callable[[AgentOrder], Agent],
        remote: Engine | None,
        other_hosts: Collection[str],
        addresses_for: Callable[[], Awaitable[tuple[Address, ...]]],
    ) -> None:
        self._make_agent, self._remote = make_agent, remote
        self._other_hosts, self._addresses_for = other_hosts, addresses_for
        self._lock = asyncio.Lock()

    async def start(self, order: AgentOrder) -> RunningAgent:
        """Start the agent of one host."""
        if self._remote is None or order.host not in self._other_hosts:
            return LocalAgent(self._make_agent(order))
        async with self._lock:
            try:
                addresses = await self._addresses_for()
            except ConfigError as error:
                raise StartFailed(str(error), is_final=True) from None
        return await self._remote.start(replace(order, coordinators=addresses))

    async def close(self) -> None:
        """Close the other engine."""
        if self._remote is not None:
            await self._remote.close()
