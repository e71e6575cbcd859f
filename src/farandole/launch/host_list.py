"""Hosts and their slots, as written by users. Used by the command line, host discovery and local.py."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from farandole.agent.completion import to_its_end
from farandole.errors import ConfigError, FarandoleError

_HOST_LINE = re.compile(r"(?P<name>\S+)(?:\s+slots\s*=\s*(?P<slots>\S+))?")


@dataclass(frozen=True)
class HostSlots:
    """A host, under its given name, and for how many workers it has capacity. Raises ConfigError for an invalid name,
    or fewer than one slot."""

    name: str
    slots: int

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.:%-]*", self.name):
            raise ConfigError(f"{self.name!r} is not a valid host name")
        if self.slots < 1:
            raise ConfigError(f"host {self.name} needs at least 1 slot, got {self.slots}")

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def parse_hosts(text: str, default_slots: int = 1) -> tuple[HostSlots, ...]:
    """Return the hosts in the order in which they are written: "a:2,b:2"; without a number, `default_slots`. Raises
    ConfigError for anything else, and for a host that is named twice."""
    entries = [entry.strip() for entry in text.split(",")]
    try:
        return _each_once(parse_host(entry, default_slots) for entry in entries)
    except ConfigError as error:
        raise ConfigError(f"the hosts {text!r} cannot be read: {error}; write them as host1:2,host2:4") from None


def parse_host(text: str, default_slots: int = 1) -> HostSlots:
    """Return one host: "a:2", or "a" with `default_slots`. Raises ConfigError for anything else."""
    name, colon, slots = text.rpartition(":")
    return HostSlots(name, _count(slots)) if colon else HostSlots(text, default_slots)


def parse_hostfile(path: str | Path) -> tuple[HostSlots, ...]:
    """Return the hosts of a file with a line "host slots=N" for each; "host" alone has one slot. Empty lines and text
    after a # are ignored. Raises ConfigError that names the line, also when there is no host in it."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the hostfile {path} cannot be read: {error}") from None
    hosts: list[HostSlots] = []
    for number, line in enumerate(lines, start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        try:
            match = _HOST_LINE.fullmatch(content)
            if match is None:
                raise ConfigError("a line must look like 'host slots=2'")
            slots = 1 if match["slots"] is None else _count(match["slots"])
            hosts = [*_each_once([*hosts, HostSlots(match["name"], slots)])]
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}, {line!r}: {error}") from None
    if not hosts:
        raise ConfigError(f"the hostfile {path} contains no host; it needs lines such as 'host slots=2'")
    return tuple(hosts)


@lru_cache(maxsize=1024)
def is_this_machine(name: str) -> bool:
    """Return whether the name, or numeric address, belongs to this machine. May query the name service, which can take
    seconds; the answer is cached."""
    if name in ("localhost", socket.gethostname()):
        return True
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: tuple[object, ...]) -> bool:
    """Return whether a socket can be bound to the address: only an address of this machine allows it."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0, *address[2:]))
    except OSError:
        return False
    return True


def _count(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"the number of slots must be a whole number, got {text!r}") from None


def _each_once(hosts: Iterable[HostSlots]) -> tuple[HostSlots, ...]:
    seen: dict[str, HostSlots] = {}
    for host in hosts:
        if host.name in seen:
            raise ConfigError(f"host {host.name} is listed twice")
        seen[host.name] = host
    return tuple(seen.values())


# The discovery of a job's hosts, repeated because they come and go. local.py runs it, the coordinator follows.


DISCOVERY_PERIOD_S = 1.0
SCRIPT_TIME_LIMIT_S = 60.0
_REPORTED_CHARACTERS = 500  # of what a failed script wrote to stderr


class DiscoveryFailed(FarandoleError):
    """The hosts could not be determined this time. The previous list remains valid."""


class HostDiscovery(Protocol):
    """`find` returns the current hosts; it raises DiscoveryFailed and never blocks the event loop. It is called again
    `period_s` seconds after each answer."""

    period_s: float

    def find(self) -> Awaitable[tuple[HostSlots, ...]]: ...


class ScriptDiscovery:
    """Runs a command (in a shell, as Horovod does) whose output names a host in each line: `host` or `host:slots`.
    Empty output means that no host is available now.

    default_slots  slots of hosts without a number
    time_limit_s   a run that takes longer is killed, and counts as failed
    """

    def __init__(
        self,
        command: str,
        default_slots: int = 1,
        *,
        period_s: float | None = None,
        time_limit_s: float = SCRIPT_TIME_LIMIT_S,
    ) -> None:
        if default_slots < 1:
            raise ConfigError(f"--slots-per-host must be at least 1, got {default_slots}")
        self.period_s = DISCOVERY_PERIOD_S if period_s is None else period_s
        self._command, self._default_slots, self._time_limit_s = command, default_slots, time_limit_s

    async def find(self) -> tuple[HostSlots, ...]:
        """Run the command once. Raises DiscoveryFailed when it fails, takes too long or writes anything but hosts."""
        text = await self._run()
        hosts: dict[str, HostSlots] = {}
        for line in filter(None, map(str.strip, text.splitlines())):
            try:
                host = parse_host(line, self._default_slots)
            except ConfigError as error:
                raise self._failed(f"wrote the line {line!r}: {error}; a line must be 'host' or 'host:slots'") from None
            hosts[host.name] = host  # The last line about a host counts, as in Horovod.
        return tuple(hosts.values())

    async def _run(self) -> str:
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_shell(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        )
        try:
            # If it is cancelled midway, asyncio waits for the end of the process and of all its output, without limit
            # (CPython 3.11, Lib/asyncio/unix_events.py, _make_subprocess_transport).
            process = await to_its_end(starting)
        except OSError as error:
            raise self._failed(f"could not be started: {error}") from None
        except asyncio.CancelledError:
            if starting.exception() is None:
                await _end(starting.result())
            raise
        try:
            async with asyncio.timeout(self._time_limit_s):
                out, err = await process.communicate()
        except TimeoutError:
            await _end(process)
            raise self._failed(f"did not end within {self._time_limit_s:g} s and was killed") from None
        except BaseException:  # the result is not wanted any more
            await _end(process)
            raise
        if process.returncode != 0:
            message = err.decode("utf-8", "backslashreplace").strip()[-_REPORTED_CHARACTERS:]
            raise self._failed(f"ended with exit code {process.returncode}" + (f": {message}" if message else ""))
        return out.decode("utf-8", "backslashreplace")

    def _failed(self, how: str) -> DiscoveryFailed:
        return DiscoveryFailed(f"the host discovery script {self._command!r} {how}")


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill all processes of the command. The shell may be gone while its background processes hold its output open:
    they keep the group's number in use."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # asyncio closes the pipes only at their end, which a process that has left the group can delay without limit
    # (CPython 3.11, Lib/asyncio/base_subprocess.py, BaseSubprocessTransport._try_finish).
    process._transport.close()  # type: ignore[attr-defined]
    await process.wait()
