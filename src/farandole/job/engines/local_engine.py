"""The engine of this machine, whose agents run in this process, and the one that asks it or another one by the host."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace

from farandole.base.membership import Address
from farandole.errors import ConfigError
from farandole.job.agent.agent import Agent
from farandole.job.engines.engine_interface import AgentExit, AgentOrder, Engine, RunningAgent, StartFailed


class LocalEngine:
    """`make_agent` makes the agent for an order."""

    def __init__(self, make_agent: Callable[[AgentOrder], Agent]) -> None:
        self._make_agent = make_agent

    async def start(self, order: AgentOrder) -> LocalAgent:
        """Start the agent on this event loop."""
        return LocalAgent(self._make_agent(order))

    async def close(self) -> None:
        """Do nothing: the agents are closed already."""


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
    """Starts agents on this machine by one engine, and on others by another one.

    other_hosts    the names of other machines; it may change
    addresses_for  returns the addresses at which other machines may reach the coordinator, which listens there then
    """

    def __init__(
        self,
        local: Engine,
        remote: Engine | None,
        other_hosts: Collection[str],
        addresses_for: Callable[[], Awaitable[tuple[Address, ...]]],
    ) -> None:
        self._local, self._remote = local, remote
        self._other_hosts, self._addresses_for = other_hosts, addresses_for
        self._lock = asyncio.Lock()

    async def start(self, order: AgentOrder) -> RunningAgent:
        """Start the agent of one host."""
        if self._remote is None or order.host not in self._other_hosts:
            return await self._local.start(order)
        async with self._lock:
            try:
                addresses = await self._addresses_for()
            except ConfigError as error:
                raise StartFailed(str(error), is_final=True) from None
        return await self._remote.start(replace(order, coordinators=addresses))

    async def close(self) -> None:
        """Close both engines."""
        await self._local.close()
        if self._remote is not None:
            await self._remote.close()
