"""The fleet: one agent on each host that a job may use now. job_runner.py creates it, engines start the agents."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterable

from farandole.base.events.event import Event
from farandole.base.events.host_events import AgentNotStarted, HostDrained, HostUndrained
from farandole.errors import ConfigError
from farandole.job.engines.engine_interface import AgentExit, AgentOrder, Engine, RunningAgent, StartFailed
from farandole.job.engines.host_list import HostSlots

AGAIN_S = (1.0, 30.0)
"""Seconds until an agent that has ended is started again: doubled by each further failure, up to the second one."""


class Fleet:
    """The agents of a job, used on one event loop.

    order_for     returns the order for the agent of a host
    on_gone       called with a host and the reason when an engine has seen that its agent and all workers are gone
    on_event      called with the fleet's own events
    is_over       returns whether the job has ended
    must_succeed  a host that can never be used ends the job, as long as it does not train: the user is present to
                  correct the list of hosts
    again_s       as AGAIN_S
    """

    def __init__(
        self,
        engine: Engine,
        order_for: Callable[[HostSlots], AgentOrder],
        *,
        on_gone: Callable[[str, str], None],
        on_event: Callable[[Event], None],
        is_over: Callable[[], bool],
        must_succeed: bool = True,
        again_s: tuple[float, float] = AGAIN_S,
    ) -> None:
        self._engine, self._order_for = engine, order_for
        self._on_gone, self._on_event, self._is_over = on_gone, on_event, is_over
        self._must_succeed, self._again_s = must_succeed, again_s
        self._wanted: dict[str, HostSlots] = {}
        self._agents: dict[str, RunningAgent] = {}
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._drained: set[str] = set()
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with the error when an agent cannot be started for a reason that the user must correct, or when an
        engine itself has failed."""

    def follow(self, hosts: Iterable[HostSlots]) -> None:
        """Start an agent for each of these hosts that has none. Agents of other hosts end once they are dismissed. A
        host that was drained stays so until it has been removed."""
        self._wanted = {host.name: host for host in hosts}
        self._drained &= self._wanted.keys()
        self._start_missing()

    def on_decision(self, event: HostDrained | HostUndrained) -> None:
        """Follow a decision of the coordinator: a drained host gets no agent, until it is undrained."""
        if isinstance(event, HostDrained):
            self._drained.add(event.host)
        else:
            self._drained.discard(event.host)
            self._start_missing()

    def training_begins(self) -> None:
        """Note that workers train: from now on a host that cannot be used does not end the job."""
        self._must_succeed = False

    def kill_workers(self) -> None:
        """End all workers at once, also those that are in their grace period."""
        for agent in self._agents.values():
            agent.kill_workers()

    async def gone(self, within_s: float | None = None) -> None:
        """Wait, when the job is over, until all agents have ended, which they do when they are told. One that could
        not be told, because its host is gone, is not waited for any longer than `within_s`; None: for ever."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
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
        await self._engine.close()

    def _start_missing(self) -> None:
        for name in self._wanted:
            if name not in self._lives and name not in self._drained:
                self._lives[name] = asyncio.create_task(self._live(name))
                self._lives[name].add_done_callback(self._on_life_over)

    def _is_wanted(self, name: str) -> bool:
        return name in self._wanted and name not in self._drained and not self._is_over()

    async def _live(self, name: str) -> None:
        """Run the agents of one host, one after the other."""
        failures = 0
        try:
            while self._is_wanted(name):
                end = await self._serve(name)
                if not self._is_wanted(name):
                    return
                failures = failures + 1 if end.reason else 0
                if end.is_final and self._must_succeed:
                    raise ConfigError(f"host {name}: {end.reason}")
                first_s, longest_s = self._again_s
                again_s = min(longest_s, first_s * 2.0 ** max(0, failures - 1))
                again_s *= random.uniform(0.8, 1.2)  # hosts that failed together do not all return together
                if end.reason:
                    self._on_event(AgentNotStarted(name, end.reason, again_s))
                await asyncio.sleep(again_s)
        finally:
            del self._lives[name]

    async def _serve(self, name: str) -> AgentExit:
        """Run one agent to its end."""
        try:
            agent = await self._engine.start(self._order_for(self._wanted[name]))
        except StartFailed as error:
            return AgentExit(str(error), error.is_final)
        self._agents[name] = agent
        try:
            end = await agent.wait()
        finally:
            del self._agents[name]
            await agent.close()
        if end.are_workers_gone:
            self._on_gone(name, end.reason or "its agent has ended")
        return end

    def _on_life_over(self, life: asyncio.Task[None]) -> None:
        if not life.cancelled() and (error := life.exception()) is not None and not self.broken.done():
            self.broken.set_exception(error)
        elif not life.cancelled() and not self._is_over():
            self._start_missing()  # a host that was wanted again meanwhile
