"""The hosts of a job: a fixed list, or a discovery that is repeated because they come and go. job_runner.py runs it;
the coordinator and the fleet follow."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Protocol

from farandole.base.config import JobConfig
from farandole.base.events.event import Event
from farandole.base.events.host_events import HostDiscoveryFailed, HostRefused
from farandole.base.machine import now_s
from farandole.errors import ConfigError, FarandoleError
from farandole.job.agent.spawner import to_its_end
from farandole.job.engines.host_list import HostScript, HostSlots, check_total, is_this_machine, parse_host

DISCOVERY_PERIOD_S = 1.0
SCRIPT_TIME_LIMIT_S = 60.0
ANSWERS_IN_A_ROW = 5
"""So many answers in a row are believed when there is no host in them at all, or when they take away what was away
before and has come back. A query that fails often looks like one that finds less, and each time to believe it costs
workers, whose replacements begin anew."""
AGAIN_S = 60.0
"""A failure that has been reported, and comes again after answers, is reported again after this time."""
OUTPUT_BYTES = 4 << 20
"""Bytes of the longest list of hosts."""
ERROR_BYTES = 64 << 20
"""Bytes that a script may write to its standard error."""
_REPORTED_CHARACTERS = 500  # of what a failed script wrote to stderr


class DiscoveryFailed(FarandoleError):
    """The hosts could not be determined this time. The previous list remains valid."""


class HostsOver(DiscoveryFailed):
    """No host will be available any more: the job ends with grace."""


class HostDiscovery(Protocol):
    """`find` returns the current hosts; it raises DiscoveryFailed and never blocks the event loop. It is called again
    `period_s` seconds after each answer."""

    period_s: float

    def find(self) -> Awaitable[tuple[HostSlots, ...]]: ...


class ScriptDiscovery:
    """Runs a command (in a shell, as Horovod does) whose output names a host in each line: `host` or `host:slots`.
    Empty output means that no host is available now; it is believed after a few times (HostsSource).

    time_limit_s  a run that takes longer is killed, and counts as failed
    """

    def __init__(self, script: HostScript, time_limit_s: float = SCRIPT_TIME_LIMIT_S) -> None:
        self.period_s = DISCOVERY_PERIOD_S if script.period_s is None else script.period_s
        self._script, self._time_limit_s = script, time_limit_s

    async def find(self) -> tuple[HostSlots, ...]:
        """Run the command once. Raises DiscoveryFailed when it fails, takes too long or writes anything but hosts."""
        text = await self._run()
        hosts: dict[str, HostSlots] = {}
        for line in filter(None, map(str.strip, text.splitlines())):
            try:
                host = parse_host(line, self._script.slots)
            except ConfigError as error:
                written = line[:_REPORTED_CHARACTERS]
                raise self._failed(
                    f"wrote the line {written!r}: {error}; a line must be 'host' or 'host:slots'"
                ) from None
            hosts[host.name] = host  # The last line about a host counts, as in Horovod.
        try:
            check_total(hosts.values())
        except ConfigError as error:
            raise self._failed(f"wrote too much: {error}") from None
        return tuple(hosts.values())

    async def _run(self) -> str:
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_shell(
                self._script.command,
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
                out, err = await _output(process)
        except TimeoutError:
            await _end(process)
            raise self._failed(f"did not end within {self._time_limit_s:g} s and was killed") from None
        except _TooMuch as error:
            await _end(process)
            raise self._failed(f"{error} and was killed") from None
        except BaseException:  # the result is not wanted any more
            await _end(process)
            raise
        if process.returncode != 0:
            message = err.decode("utf-8", "backslashreplace").strip()[-_REPORTED_CHARACTERS:]
            raise self._failed(f"ended with exit code {process.returncode}" + (f": {message}" if message else ""))
        return out.decode("utf-8", "backslashreplace")

    def _failed(self, how: str) -> DiscoveryFailed:
        return DiscoveryFailed(f"the host discovery script {self._script.command!r} {how}")


class _TooMuch(Exception):
    """A script writes without end."""


async def _output(process: asyncio.subprocess.Process) -> tuple[bytes, bytes]:
    """Return the whole standard output and the end of the standard error of a process, once it has ended. Raises
    _TooMuch: the list is in memory, and a script in a loop would fill it."""
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.TaskGroup() as group:
            out = group.create_task(_read(process.stdout, "standard output", OUTPUT_BYTES))
            err = group.create_task(_read(process.stderr, "standard error", ERROR_BYTES, kept=4 * _REPORTED_CHARACTERS))
            group.create_task(process.wait())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return out.result(), err.result()


async def _read(stream: asyncio.StreamReader, what: str, most: int, kept: int | None = None) -> bytes:
    """Return all that a stream brings, or its last `kept` bytes. Raises _TooMuch beyond `most` bytes."""
    data, count = b"", 0
    while part := await stream.read(1 << 16):
        count += len(part)
        if count > most:
            raise _TooMuch(f"wrote more than {most} bytes to its {what}")
        data = (data + part)[-kept:] if kept is not None else data + part
    return data


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill all processes of the command. The shell may be gone while its background processes hold its output open:
    they keep the group's number in use."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # asyncio closes the pipes only at their end, which a process that has left the group can delay without limit
    # (CPython 3.11, Lib/asyncio/base_subprocess.py, BaseSubprocessTransport._try_finish).
    process._transport.close()  # type: ignore[attr-defined]
    await process.wait()


# The hosts of one job, fixed or discovered ----------------------------------------------------------------------------


class HostsSource:
    """The hosts of a job: `await first()`; then, unless they are fixed, `await follow(on_hosts)`.

    takes_others     whether hosts may be other machines
    are_all_others   whether they count as such whatever their names mean, since the engine that runs their agents has
                     named them
    """

    def __init__(
        self,
        config: JobConfig,
        hosts: tuple[HostSlots, ...] | HostDiscovery | None,
        takes_others: bool,
        on_event: Callable[[Event], None],
        are_all_others: bool = False,
    ) -> None:
        self._config, self._takes_others, self._on_event = config, takes_others, on_event
        self._are_all_others = are_all_others
        self._discovery = None if hosts is None or isinstance(hosts, tuple) else hosts
        self.hosts: tuple[HostSlots, ...] = ()
        """The current hosts, in the order of their ranks."""
        if hosts is None:
            self.hosts = (HostSlots("localhost", config.most_slots),)
        elif isinstance(hosts, tuple):
            self.hosts = hosts
        self.others: set[str] = set()
        """The names of other machines that have been found so far."""
        self._refused: set[str] = set()
        self._last_failure, self._reported_s, self._has_answered = "", 0.0, False
        self._fewer_answers: dict[str, int] = {}  # in a row, for each host of which they offered fewer slots, or none
        self._were_fewer = set[str]()  # hosts from which a believed answer has taken slots away
        self._come_and_go = set[str]()  # those of them that got slots back

    @property
    def are_fixed(self) -> bool:
        """Return whether the hosts stay the same."""
        return self._discovery is None

    async def first(self) -> tuple[HostSlots, ...]:
        """Return the hosts at the start; an empty list is allowed. Raises ConfigError when they cannot be determined,
        or cannot be used: at the start the user is present to correct it."""
        if self._discovery is not None:
            try:
                self.hosts = await self._discovery.find()
            except DiscoveryFailed as error:
                raise ConfigError(str(error)) from error
        else:
            check_total(self.hosts)
            slots = sum(each.slots for each in self.hosts)
            if slots < self._config.num_proc and not self._config.takes_agents:
                named = ", ".join(map(str, self.hosts)) or "no hosts"
                raise ConfigError(f"-np {self._config.num_proc} is above the {slots} slots of {named}")
        if others := await self._note_others(self.hosts):
            raise ConfigError(_why_refused(", ".join(others)))
        return self.hosts

    async def follow(self, on_hosts: Callable[[tuple[HostSlots, ...]], None]) -> None:
        """Call `on_hosts` with all hosts whenever they have changed; for ever. A failure is reported, and the discovery
        repeated: a training job does not end because of it. Raises HostsOver when there will be no hosts any more."""
        assert self._discovery is not None
        while True:
            await asyncio.sleep(self._discovery.period_s)
            try:
                found = self._believed(await self._discovery.find())
            except HostsOver:
                raise
            except DiscoveryFailed as error:
                self._report(str(error))
                continue
            self._has_answered = True
            refused = await self._note_others(found)
            for name in refused - self._refused:
                self._on_event(HostRefused(name, _why_refused(name)))
            self._refused |= refused
            hosts = tuple(host for host in found if host.name not in refused)
            if set(hosts) != set(self.hosts):
                self.hosts = hosts
                on_hosts(hosts)

    def _report(self, failure: str) -> None:
        """Report a failure, unless it is the last one, which goes on or comes and goes."""
        is_new = failure != self._last_failure
        if is_new or (self._has_answered and now_s() >= self._reported_s + AGAIN_S):
            self._last_failure, self._reported_s, self._has_answered = failure, now_s(), False
            self._on_event(HostDiscoveryFailed(failure))

    def _believed(self, found: tuple[HostSlots, ...]) -> tuple[HostSlots, ...]:
        """Return the hosts that were found, and for a while those that were not, or have fewer slots now, if they come
        and go. Raises DiscoveryFailed where no host was found, for the first few times: only an engine knows that."""
        if self._are_all_others:
            return found
        offered, kept = {host.name: host for host in found}, dict[str, HostSlots]()
        for host in self.hosts:
            now = offered[host.name].slots if host.name in offered else 0
            if now >= host.slots:
                self._fewer_answers.pop(host.name, None)
                continue
            self._fewer_answers[host.name] = count = self._fewer_answers.get(host.name, 0) + 1
            if count < ANSWERS_IN_A_ROW and (not found or host.name in self._come_and_go):
                kept[host.name] = host
        if kept and not found:
            raise DiscoveryFailed(
                f"host discovery found no host at all, which counts after {ANSWERS_IN_A_ROW} times in a row"
            )
        believed = {**offered, **kept}
        self._note_changes(believed)
        return tuple(believed.values())

    def _note_changes(self, believed: Mapping[str, HostSlots]) -> None:
        """Note which hosts lose slots now, and which get slots again that they had lost."""
        slots = {host.name: host.slots for host in self.hosts}
        now = {name: host.slots for name, host in believed.items()}
        gaining = {name for name in self._were_fewer if now.get(name, 0) > slots.get(name, 0)}
        losing = {name for name in slots if now.get(name, 0) < slots[name]}
        self._come_and_go |= gaining
        self._were_fewer = (self._were_fewer | losing) - gaining
        for name in losing:
            self._fewer_answers.pop(name, None)

    async def _note_others(self, hosts: Iterable[HostSlots]) -> set[str]:
        """Note which hosts are other machines, and return those that cannot be used because of it."""
        if self._are_all_others:
            self.others |= {each.name for each in hosts}
            return set()
        others = {each.name for each in hosts if not await asyncio.to_thread(is_this_machine, each.name)}
        if self._takes_others:
            self.others |= others
            return set()
        return others


def _why_refused(name: str) -> str:
    return (
        f"host {name} is another machine, on which this command cannot start workers: start the job with --host "
        "ADDRESS and --token-file FILE, and run on that machine: farandole agent --join ADDRESS:PORT --slots N "
        "--token-file COPY"
    )
