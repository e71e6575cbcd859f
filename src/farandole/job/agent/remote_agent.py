"""A remote agent: it joins the job of another machine, serves it, and joins again when it was lost. Used by
agent_command.py.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol, cast

import msgspec

from farandole.base.env import inherited_environment
from farandole.base.events.event import Event
from farandole.base.events.host_events import AgentRejoins, AgentServes, AgentWaits
from farandole.base.machine import installed_software, now_s
from farandole.base.membership import Address
from farandole.base.wire.channel import HANDSHAKE_DEADLINE_S, Channel, TokenRefused, connect
from farandole.base.wire.encryption import Certificates
from farandole.base.wire.frames import TO_AGENT
from farandole.base.wire.function_call import CallComes, receive_call
from farandole.base.wire.message import PROTOCOL_VERSION
from farandole.base.wire.messages import (
    AgentHello,
    OutputMessage,
    Refused,
    ToAgent,
    Welcome,
    WorkerPrinted,
    WorkerRanked,
    WorkerSilent,
)
from farandole.errors import AuthenticationError, ConfigError, FarandoleError, ProtocolError
from farandole.job.agent.agent import Agent, AgentConfig, EndOfService, Service
from farandole.job.agent.coordinator_session import CoordinatorSession, Reconnecting
from farandole.job.agent.host_resources import share_cores
from farandole.job.agent.network_addresses import own_addresses

_CALL_DEADLINE_S = 600.0  # for the largest call on a slow network
_AGAIN_S = 0.5  # between two attempts to join
_NEXT_ADDRESS_S = 0.2  # between two addresses of the coordinator; most answer sooner


class CannotJoin(FarandoleError):
    """No coordinator accepted this agent within the time for its attempts."""


@dataclass(frozen=True)
class JoinOptions:
    """The options of a joining agent; the coordinator sends all others.

    coordinators  the addresses at which the coordinator may be reached; the first one that answers is used
    retry_s       seconds for which it tries to join, at the beginning and after it was lost
    folder        the workers' working directory; None: the job's
    grace_s       seconds from the request to end until workers are killed; None: the job's
    interfaces    the network interfaces for tensors; empty: all, first the one that leads to the coordinator
    tls           the job's certificates, with which its TCP connections are encrypted; None: they are not
    find          returns the addresses at which the coordinator may be reached now; None: they never change
    id            what tells this agent from another one of a host of the same name, such as a pod that is made anew
    """

    coordinators: tuple[Address, ...]
    token: bytes = field(repr=False)
    host: str
    slots: int
    retry_s: float
    folder: str | None = None
    grace_s: float | None = None
    interfaces: tuple[str, ...] = ()
    id: str = ""
    tls: Certificates | None = field(default=None, repr=False)
    find: Callable[[], tuple[Address, ...]] | None = None

    @property
    def name(self) -> str:
        return f"{self.host}/{self.id}" if self.id else self.host


class JoiningAgent:
    """A joining agent, created and run on one event loop: `await run()`. When that returns or raises, no worker is
    left."""

    def __init__(self, options: JoinOptions, on_event: Callable[[Event], None]) -> None:
        self._options, self._on_event = options, on_event
        self._process = secrets.token_hex(8)
        self._agent: Agent | None = None
        self._run: asyncio.Task[Service] | None = None
        self._is_leaving = False
        self._coordinator = options.coordinators[0]  # the address of the connection
        self._disconnected: set[Address] = set()  # addresses that did so at the last attempt, once the token was proved

    async def run(self) -> Service:
        """Serve until the job has ended or this host is left. Raises CannotJoin, and ConfigError for errors that
        another attempt would not change."""
        self._run = asyncio.create_task(self._serve_again_and_again())
        try:
            return await self._run
        except asyncio.CancelledError:
            if self._run.cancelled() and self._is_leaving:
                return Service(EndOfService.DRAINED, "it was stopped before it joined a job")
            self._run.cancel()
            raise

    def leave(self, reason: str, now: bool = False, within_s: float = 0.0) -> None:
        """Leave the job in an orderly way, or `now`; at once if this agent has not joined. `within_s`: as in
        Agent.leave()."""
        is_first, self._is_leaving = not self._is_leaving, True
        if self._agent is None:
            if self._run is not None:
                self._run.cancel()
        elif now:
            self._agent.kill_workers()
        elif is_first:
            self._agent.leave(reason, within_s)

    def abandon(self) -> None:
        """End the workers at once, and leave."""
        self._is_leaving = True
        if self._agent is not None:
            self._agent.abandon()
        if self._run is not None:
            self._run.cancel()

    async def _serve_again_and_again(self) -> Service:
        while True:
            channel, hello, welcome, call = await self._join()
            try:
                config = self._config(welcome)
            except OSError as error:
                channel.close()
                raise ConfigError(
                    f"the job runs in {self._options.folder or welcome.folder}, which cannot be entered on this "
                    f"machine ({error.strerror}); give the folder that has its files here with --folder"
                ) from None
            self._on_event(AgentServes(welcome.job_id, config.slots))
            dial_again = partial(self._dial_again, welcome.job_id)
            reconnecting = Reconnecting(welcome.job_id, hello, dial_again, welcome.patience_s, self._on_event)
            session = CoordinatorSession(channel, welcome.epoch, reconnecting if welcome.patience_s else None)
            output = ForwardedOutput(session)
            self._agent = Agent(config, output, self._on_event, session, call)
            try:
                service = await self._agent.run()
            finally:
                output.stop()
                self._agent = None
            if service.end is not EndOfService.LOST or self._is_leaving:
                return service
            self._on_event(AgentRejoins(str(self._coordinator), service.reason))

    async def _join(self) -> tuple[Channel[ToAgent], AgentHello, Welcome, bytes]:
        """Try to join until the agent is welcomed, or the time is over."""
        deadline_s, last = now_s() + self._options.retry_s, ""
        while True:
            try:
                return await self._attempt()
            except _NotNow as error:
                why = str(error)
            if now_s() + _AGAIN_S > deadline_s:
                raise CannotJoin(f"{why} (tried for {self._options.retry_s:g} s, see --retry)")
            if why != last:
                self._on_event(AgentWaits(why, self._options.retry_s))
                last = why
            await asyncio.sleep(_AGAIN_S)

    async def _dial_again(self, job_id: str) -> Channel[ToAgent]:
        """Dial the coordinator of this job. One of another job with the same token may listen there by now: it must not
        tell this agent that its session is over."""
        try:
            channel, self._coordinator = await self._dial_all(job_id)
        except (_NotNow, ConfigError) as error:
            raise ConnectionError(str(error)) from None
        return channel

    async def _attempt(self) -> tuple[Channel[ToAgent], AgentHello, Welcome, bytes]:
        channel, self._coordinator = await self._dial_all()
        options, coordinator = self._options, self._coordinator
        hello = AgentHello(
            options.name,
            options.host,
            options.slots,
            PROTOCOL_VERSION,
            process=self._process,
            is_apart=True,
            software=installed_software(),
        )
        try:
            channel.send(hello)
            call = b""
            async with asyncio.timeout(HANDSHAKE_DEADLINE_S):
                answer = await channel.receive()
            if isinstance(answer, CallComes):
                async with asyncio.timeout(_CALL_DEADLINE_S):
                    call = await receive_call(channel, answer.size)
                    answer = await channel.receive()
            if isinstance(answer, Refused) and not answer.is_final:
                raise _NotNow(f"{coordinator} does not accept this agent now: {answer.reason}")
            if isinstance(answer, Refused):
                raise ConfigError(f"{coordinator} refuses this agent: {answer.reason}")
            if not isinstance(answer, Welcome):
                raise ConfigError(f"{coordinator} sent {type(answer).__name__} before Welcome")
        except (TimeoutError, OSError) as error:
            channel.abort()
            raise _NotNow(_format_error(error, coordinator)) from None
        except (ProtocolError, AuthenticationError) as error:
            channel.abort()
            raise ConfigError(f"{coordinator}: {error}") from None
        except BaseException:
            channel.abort()
            raise
        return channel, hello, answer, call

    async def _dial_all(self, job_id: str | None = None) -> tuple[Channel[ToAgent], Address]:
        """Dial all addresses of the coordinator, each a little later than the one before, and return the first
        connection. `job_id`: None for any job. Raises ConfigError when none of them will accept this agent later
        either."""
        find, addresses = self._options.find, self._options.coordinators
        if find is not None:
            addresses = await asyncio.to_thread(find)  # a network file system may be slow
        dials = {
            asyncio.create_task(self._dial(each, job_id, delay_s=index * _NEXT_ADDRESS_S)): each
            for index, each in enumerate(addresses)
        }
        failures: list[Exception] = []
        waiting = set(dials)
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    try:
                        return each.result(), dials.pop(each)
                    except (_NotNow, ConfigError) as error:
                        failures.append(error)
        finally:
            await _abort(dials)
        if all(isinstance(error, ConfigError) for error in failures):
            raise failures[0]
        raise _NotNow("; ".join(str(error) for error in failures if isinstance(error, _NotNow)))

    async def _dial(self, address: Address, job_id: str | None, delay_s: float) -> Channel[ToAgent]:
        await asyncio.sleep(delay_s)
        token, tls = self._options.token, self._options.tls
        try:
            channel = await connect(address.host, address.port, token, job_id, TO_AGENT, tls)
        except (TokenRefused, AuthenticationError) as error:
            if isinstance(error, TokenRefused) and address not in self._disconnected:  # or it has ended at this moment
                self._disconnected.add(address)
                raise _NotNow(
                    f"{address} does not accept this agent now: the coordinator closed the connection after this agent "
                    "had proved the token"
                ) from None
            raise ConfigError(f"{address} does not accept the token: use a copy of the job's --token-file") from None
        except ProtocolError as error:
            raise ConfigError(f"{address}: {error}") from None
        except OSError as error:
            self._disconnected.discard(address)
            raise _NotNow(_format_error(error, address)) from None
        self._disconnected.discard(address)
        return channel

    def _config(self, welcome: Welcome) -> AgentConfig:
        """Return the configuration, and enter the job's folder: workers inherit it. Raises OSError when that fails,
        unless the job can do without."""
        options = self._options
        try:
            os.chdir(options.folder or welcome.folder)
        except OSError:
            if options.folder or welcome.needs_folder:
                raise
        variables = {**inherited_environment(), **welcome.environment}
        return AgentConfig(
            name=options.name,
            host=options.host,
            slots=options.slots,
            coordinator=self._coordinator,
            token=options.token,
            job=msgspec.structs.replace(
                welcome,
                command=with_own_python(welcome.command),
                environment=share_cores(variables, options.slots, self._on_event),
                grace_s=welcome.grace_s if options.grace_s is None else options.grace_s,
            ),
            is_apart=True,
            data_hosts=tuple(own_addresses(options.interfaces)) if options.interfaces else (),
            process=self._process,
            tls=options.tls,
        )


def with_own_python(command: Sequence[str]) -> tuple[str, ...]:
    """Return the command with this process's Python in place of an empty first word."""
    return tuple(command) if command[0] else (sys.executable, *command[1:])


async def _abort(dials: Mapping[asyncio.Task[Channel[ToAgent]], Address]) -> None:
    for each in dials:
        each.cancel()
    for result in await asyncio.gather(*dials, return_exceptions=True):
        if isinstance(result, Channel):
            result.abort()


class _NotNow(Exception):
    """The agent was not accepted for a reason that may pass."""


def _format_error(error: OSError, address: Address) -> str:
    if isinstance(error, ConnectionRefusedError):
        return f"no process listens at {address}"
    if isinstance(error, TimeoutError):
        return f"{address} did not answer within {HANDSHAKE_DEADLINE_S:g} s"
    return f"{address} cannot be reached: {error}"


# The output of workers on other machines: forwarded by their agent, shown by the coordinator's process ----------------


class Sink(Protocol):
    """The destination of the lines of an agent's workers: an OutputSink (launch/output.py), or the coordinator.

    Call it on a running event loop; no call waits.
    """

    def expected(self, worker: str, rank: int) -> None: ...

    def placed(self, worker: str, rank: int) -> None: ...

    def line(self, worker: str, stream: str, data: bytes) -> None: ...

    def closed(self, worker: str) -> None: ...


# On the other machine: forwarded to the coordinator -------------------------------------------------------------------

UNSENT_LIMIT = 1 << 20
"""Bytes that may wait for the connection before lines are dropped."""

_COLLECT_S = 0.02
_MESSAGE_BYTES = 1 << 16

OutputStream = Literal["stdout", "stderr"]


class ForwardedOutput:
    """A Sink, used on one event loop."""

    def __init__(self, session: CoordinatorSession) -> None:
        self._session = session
        self._lines: dict[tuple[str, OutputStream], list[bytes]] = {}
        self._bytes = 0
        self._dropped: dict[tuple[str, OutputStream], int] = {}
        self._timer: asyncio.TimerHandle | None = None

    def expected(self, worker: str, rank: int) -> None:
        self._session.send(WorkerRanked(worker, rank, is_expected=True))

    def placed(self, worker: str, rank: int) -> None:
        self.flush()  # earlier lines keep their label
        self._session.send(WorkerRanked(worker, rank, is_expected=False))

    def line(self, worker: str, stream: str, data: bytes) -> None:
        key = (worker, cast(OutputStream, stream))
        if self._bytes + self._session.unsent_bytes > UNSENT_LIMIT:
            self._dropped[key] = self._dropped.get(key, 0) + len(data) + 1
            return
        self._lines.setdefault(key, []).append(data)
        self._bytes += len(data)
        if self._bytes >= _MESSAGE_BYTES:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_COLLECT_S, self.flush)

    def closed(self, worker: str) -> None:
        self.flush()
        self._session.send(WorkerSilent(worker))

    def stop(self) -> None:
        """Stop sending. Lines that were not sent are lost with the connection. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        collected, self._lines, self._bytes = self._lines, {}, 0
        for (worker, stream), lines in collected.items():
            dropped_bytes = self._dropped.pop((worker, stream), 0)
            self._session.send(WorkerPrinted(worker, stream, tuple(lines), dropped_bytes))


# In the coordinator's process: shown like the output of workers on its own machine ------------------------------------


class RemoteOutput:
    """Call it with an agent and its message about its workers' output; with None when no more will come."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._printing: defaultdict[str, set[str]] = defaultdict(set)  # workers by agent

    def __call__(self, agent: str, message: OutputMessage | None) -> None:
        match message:
            case None:
                for worker in sorted(self._printing.pop(agent, ())):
                    self._sink.closed(worker)
            case WorkerPrinted(worker, stream, lines, dropped_bytes):
                self._printing[agent].add(worker)
                if dropped_bytes:
                    note = f"({dropped_bytes} bytes of output were dropped here: the connection was too slow)"
                    self._sink.line(worker, stream, note.encode())
                for line in lines:
                    self._sink.line(worker, stream, line)
            case WorkerRanked(worker, rank, is_expected):
                self._printing[agent].add(worker)
                if is_expected:
                    self._sink.expected(worker, rank)
                else:
                    self._sink.placed(worker, rank)
            case WorkerSilent(worker):
                self._printing[agent].discard(worker)
                self._sink.closed(worker)
