"""The discovery of a job's hosts, repeated because they come and go. local.py runs it, the coordinator follows."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Awaitable
from typing import Protocol

from farandole.agent.completion import to_its_end
from farandole.errors import ConfigError, FarandoleError
from farandole.launch.host_list import HostSlots, parse_host

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
