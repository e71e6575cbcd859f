"""The agents of a job on this machine, one for each host name, and the watch for new host names. All names refer to
this machine.

This is the task of an engine: it starts agents on the hosts that it is told to follow. It decides nothing: an agent
ends when the coordinator dismisses it or the job ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from farandole.agent.agent import Agent, EndOfService
from farandole.errors import ConfigError
from farandole.events import Event, HostDiscoveryFailed, HostDrained, HostRefused, HostUndrained
from farandole.launch.discovery import DiscoveryFailed, HostDiscovery
from farandole.launch.host_list import HostSlots, is_this_machine

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
