"""Repeated discovery of hosts; reports when they have changed. Used by local.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from farandole.errors import ConfigError
from farandole.events import Event, HostDiscoveryFailed, HostRefused
from farandole.launch.discovery import DiscoveryFailed, HostDiscovery
from farandole.launch.host_list import HostSlots, is_this_machine
from farandole.launch.local_agents import refuse_other_machines, why_refused


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
