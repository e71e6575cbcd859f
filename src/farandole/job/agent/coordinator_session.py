"""An agent's session with the coordinator of its job, over one connection after the other: the workers continue while
the coordinator is away, and nothing that must arrive is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from farandole.base.events.event import Event
from farandole.base.events.host_events import CoordinatorBack, CoordinatorUnreachable
from farandole.base.liveness.heartbeats import HeartbeatSeal
from farandole.base.machine import since_boot_s
from farandole.base.membership import Address
from farandole.base.wire import link_messages
from farandole.base.wire.authentication import Role
from farandole.base.wire.channel import HANDSHAKE_DEADLINE_S, Channel
from farandole.base.wire.message import Message
from farandole.base.wire.message_log import MessageLog, is_counted
from farandole.base.wire.messages import (
    AgentHello,
    AgentLeaving,
    ForwardToWorkers,
    FromWorker,
    Handled,
    OutputMessage,
    Resumed,
    Resumption,
    SessionOver,
    Spawn,
    SpawnFailed,
    StartWorkers,
    TellWorkers,
    ToAgent,
    ToldWorker,
    WorkerDying,
    WorkerExited,
    WorkerMet,
    WorkerPrinted,
    WorkerRanked,
    WorkerSilent,
    WorkersTold,
)
from farandole.errors import AuthenticationError, ProtocolError

# Between two attempts to reach the coordinator. The next one is ready within milliseconds, unless its machine is gone.
_SOONEST_S, _LATEST_S = 0.005, 0.5

# An address that does not answer must not keep an agent from the one at which the next coordinator begins to listen. So
# most attempts are short; some are not, for a slow network.
_ATTEMPT_S = 1.0
_PATIENT_EVERY = 4


@dataclass(frozen=True)
class Reconnecting:
    """How a session is resumed.

    job_id      of the job that the agent serves
    hello       the agent's first message on each connection
    dial        returns a new connection to the coordinator. Raises ConnectionError, AuthenticationError or
                ProtocolError when there is none now
    patience_s  seconds without a connection after which the session is over
    on_event    gets CoordinatorUnreachable and CoordinatorBack
    """

    job_id: str
    hello: AgentHello
    dial: Callable[[], Awaitable[Channel[ToAgent]]]
    patience_s: float
    on_event: Callable[[Event], None]


class CoordinatorSession:
    """The session, on one event loop. It sends and receives as a Channel does; one task receives.

    channel       its first connection, on which the agent was welcomed; as an attribute, the one of now
    epoch         of the coordinator that did so
    reconnecting  None: the session ends with this connection
    on_resumed    called when it continues on another connection; set by the agent
    """

    def __init__(self, channel: Channel[ToAgent], epoch: int = 1, reconnecting: Reconnecting | None = None) -> None:
        self.channel, self._epoch, self._reconnecting = channel, epoch, reconnecting
        self._log: MessageLog[Message] = MessageLog()
        self._records = SessionRecords()
        self._confirmed = 0
        self._silent_s = 0.0  # before the end of the connection
        self._output: list[Message] = []  # that waits for a connection
        self._output_bytes = 0
        self._ranked: dict[tuple[str, bool], WorkerRanked] = {}  # for the labels of lines
        self._datagrams: HeartbeatSocket | None = None
        self.is_connected = True
        self.on_resumed: Callable[[Resumed], None] = lambda _: None

    @property
    def unsent_bytes(self) -> int:
        """The number of bytes that the kernel has not accepted yet."""
        return self.channel.unsent_bytes if self.is_connected else self._output_bytes

    def send(self, message: Message) -> None:
        """Send a message, now or on the next connection. What a later message replaces, such as a heartbeat, is dropped
        where there is no connection."""
        self._records.note_sent(message)
        if is_counted(message):
            self._log.keep(message)
        elif isinstance(message, WorkerRanked):
            self._ranked[message.worker, message.is_expected] = message
        elif isinstance(message, WorkerSilent):
            for is_expected in (True, False):
                self._ranked.pop((message.worker, is_expected), None)
        if self.is_connected:
            self.channel.send(message)
        elif isinstance(message, OutputMessage):
            self._output.append(message)
            if isinstance(message, WorkerPrinted):
                self._output_bytes += sum(map(len, message.lines))

    def confirm(self) -> None:
        """Tell the coordinator how many of its messages were handled, if they are more than before."""
        if self.is_connected and self._log.handled > self._confirmed:
            self._confirmed = self._log.handled
            self.channel.send(Handled(self._confirmed))

    async def receive(self) -> ToAgent:
        """Return the next message of the coordinator, on this connection or, if it ends, on the next one.

        Raises ConnectionError when the session is over, and ProtocolError or AuthenticationError when an invalid frame
        arrives.
        """
        while True:
            try:
                message = await self.channel.receive()
            except ConnectionError as error:
                if self._reconnecting is None:
                    raise
                await self._resume(self._reconnecting, error)
                continue
            if isinstance(message, Handled):
                self._log.confirm(message.count)
                continue
            if is_counted(message):
                self._log.handled += 1
            self._records.note_received(message)
            return message

    def disconnect(self, silent_s: float) -> None:
        """Give the connection up, on which the coordinator has been silent for so long, and look for the next one. The
        patience counts from the beginning of the silence."""
        self._silent_s = silent_s
        self.channel.abort()

    async def open_datagrams(
        self, token: bytes, heartbeat_id: bytes, port: int, on_heartbeat: Callable[[int, int], object]
    ) -> None:
        """Send and receive heartbeats as datagrams, too, in place of those so far. Port 0: there are none."""
        if self._datagrams is not None:
            self._datagrams.close()
        self._datagrams = HeartbeatSocket(token, heartbeat_id, on_heartbeat) if port else None
        if self._datagrams is not None:
            with contextlib.suppress(OSError):  # the connection carries heartbeats, too
                await self._datagrams.open(Address(self.channel.peer_host, port))

    def send_datagram(self, sequence: int, received: int) -> None:
        """Send a heartbeat as a datagram, where there are any."""
        if self._datagrams is not None:
            self._datagrams.send(sequence, received)

    def close(self) -> None:
        """Close the connection once all messages so far are sent. Idempotent."""
        self.channel.close()
        if self._datagrams is not None:
            self._datagrams.close()

    def abort(self) -> None:
        """Close the connection now. Idempotent."""
        self.channel.abort()

    async def _resume(self, how: Reconnecting, why: ConnectionError) -> None:
        """Continue on a new connection. Raises ConnectionError when there is none in time."""
        self.channel.abort()
        self.is_connected = False
        began_s, silent_s = since_boot_s() - self._silent_s, self._silent_s
        self._silent_s = 0.0
        if silent_s:
            why = ConnectionError(f"it has not answered for {silent_s:.2f} s")
        limit_s = how.patience_s if how.patience_s < float("inf") else None
        how.on_event(CoordinatorUnreachable(how.hello.agent, str(why), limit_s))
        reason: Exception = why
        attempt = 0
        while (away_s := since_boot_s() - began_s) < how.patience_s:
            attempt += 1
            limit_s = HANDSHAKE_DEADLINE_S if attempt % _PATIENT_EVERY == 0 else _ATTEMPT_S
            try:
                async with asyncio.timeout(min(limit_s, how.patience_s - away_s)):
                    channel = await how.dial()
                    try:
                        resumed = await self._introduce(channel, how)
                    except BaseException:
                        channel.abort()
                        raise
            except _SessionLost:
                raise
            except (ConnectionError, AuthenticationError, ProtocolError, TimeoutError) as error:
                reason = error
                away_s = since_boot_s() - began_s
                await asyncio.sleep(min(max(away_s / 4, _SOONEST_S), _LATEST_S))
                continue
            self._continue_on(channel, resumed)
            how.on_event(CoordinatorBack(how.hello.agent, since_boot_s() - began_s))
            return
        raise ConnectionError(f"{why}, and it was not back after {how.patience_s:g} s ({reason or 'no answer'})")

    async def _introduce(self, channel: Channel[ToAgent], how: Reconnecting) -> Resumed:
        channel.send(msgspec.structs.replace(how.hello, resumes=Resumption(self._epoch, self._log.handled)))
        answer = await channel.receive()
        begins_anew = isinstance(answer, TellWorkers)
        if isinstance(answer, TellWorkers):
            self._check_epoch(answer.epoch)
            channel.send(self._records.told(how.job_id))
            answer = await channel.receive()
        if isinstance(answer, SessionOver):
            raise _SessionLost(answer.reason)
        if not isinstance(answer, Resumed):
            raise ProtocolError(f"it answered with {type(answer).__name__}, not with Resumed")
        self._check_epoch(answer.epoch)
        if begins_anew:
            # Messages that the former coordinator had not confirmed are sent again: each of them is either a part of
            # what was told, or has an effect only once.
            self._log = MessageLog(kept=self._log.kept)
        return answer

    def _check_epoch(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise ProtocolError(f"it is of epoch {epoch}, which epoch {self._epoch} has replaced")

    def _continue_on(self, channel: Channel[ToAgent], resumed: Resumed) -> None:
        self.channel, self._epoch, self.is_connected = channel, resumed.epoch, True
        self._log.confirm(resumed.handled)
        self._confirmed = self._log.handled  # it was told so
        for message in self._log.after(resumed.handled):
            channel.send(message)
        for message in (*self._ranked.values(), *self._output):  # the launcher may be another one
            channel.send(message)
        self._output, self._output_bytes = [], 0
        self.on_resumed(resumed)


class _SessionLost(ConnectionError):
    """The coordinator has lost this agent."""


# Heartbeats as datagrams, beside the connection -----------------------------------------------------------------------


class HeartbeatSocket(asyncio.DatagramProtocol):
    """Calls `on_heartbeat(sequence, received)` for each valid heartbeat of the coordinator. Open from `open` to
    `close`."""

    def __init__(self, token: bytes, heartbeat_id: bytes, on_heartbeat: Callable[[int, int], object]) -> None:
        self._seal, self._on_heartbeat = HeartbeatSeal(token, heartbeat_id, Role.DIALER), on_heartbeat
        self._transport: asyncio.DatagramTransport | None = None

    async def open(self, to: Address) -> None:
        """Open the socket. Raises OSError when the system has no socket."""
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, remote_addr=(to.host, to.port))

    def send(self, sequence: int, received: int) -> None:
        """Send a heartbeat. The datagram may be lost."""
        if self._transport is not None:
            with contextlib.suppress(OSError):
                self._transport.sendto(self._seal.seal(sequence, received))

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if self._transport is not None:
            self._transport.close()

    def datagram_received(self, data: bytes, addr: object) -> None:
        if (heartbeat := self._seal.open(data)) is not None:
            self._on_heartbeat(*heartbeat)

    def error_received(self, exc: Exception) -> None:
        """Ignore the error: an unreachable coordinator is silent, and silence is judged elsewhere."""


# The agent's knowledge of its workers, from the messages that it has carried in both directions: enough to tell a
# coordinator that has lost its journal what the job is ----------------------------------------------------------------


class SessionRecords:
    """Note each message of a session, when it is sent or has come; `told()` sums them up."""

    def __init__(self) -> None:
        self._workers: dict[str, ToldWorker] = {}
        self._number = self._attempt = 0
        self._leaving = self._ending = ""

    def told(self, job_id: str) -> WorkersTold:
        workers = tuple(self._workers.values())
        return WorkersTold(job_id, workers, self._number, self._attempt, self._leaving, self._ending)

    def note_sent(self, message: Message) -> None:
        match message:
            case FromWorker(worker, payload):
                self._note_worker(worker, payload)
            case WorkerExited(worker) | SpawnFailed(worker):
                self._workers.pop(worker, None)
            case WorkerDying(worker):
                self._change(worker, is_dying=True)
            case WorkerMet(worker, True):
                self._change(worker, has_met=True)
            case AgentLeaving(reason):
                self._leaving = reason

    def note_received(self, message: Message) -> None:
        match message:
            case Spawn(worker, slot, _, attempt):
                self._workers[worker] = ToldWorker(worker, slot)
                self._attempt = max(self._attempt, attempt)
            case ForwardToWorkers(workers, order):
                for worker in workers:
                    self._note_order(worker, order)
            case StartWorkers(starts):
                for worker, start in starts.items():
                    self._note_order(worker, start)

    def _note_worker(self, worker: str, message: link_messages.WorkerMessage) -> None:
        match message:
            case link_messages.Hello():
                self._change(worker, address=message.address, pid=message.pid, has_met=True)
            case link_messages.Elastic():
                self._change(worker, is_elastic=True)
            case link_messages.Ready(number):
                self._change(worker, ready=number)
            case link_messages.Synced(number):
                self._change(worker, synced=number)
            case link_messages.FirstStep():
                self._change(worker, stepped=message.number)
            case link_messages.Finished(number, shortfall, static_because):
                self._change(worker, finished=number, shortfall=shortfall, static_because=static_because)
            case link_messages.Leaving():
                self._change(worker, is_leaving=True)
            case link_messages.Failed(summary):
                self._change(worker, raised=summary)

    def _note_order(self, worker: str, order: link_messages.ToWorker) -> None:
        match order:
            case link_messages.Newcomer():
                self._change(worker, is_newcomer=True)
            case link_messages.Start(id, placement):
                self._number = max(self._number, id.number)
                self._change(worker, generation=id, rank=placement.rank, size=placement.size)
            case link_messages.Abort(number) | link_messages.Prepare(number):
                self._number = max(self._number, number)
                self._change(worker, announced=number)
            case link_messages.Released(number):
                self._change(worker, released=number)
            case link_messages.Left():
                self._change(worker, has_left=True)
            case link_messages.Stop(reason):
                self._ending = reason

    def _change(self, worker: str, **fields: Any) -> None:
        if (known := self._workers.get(worker)) is not None:
            self._workers[worker] = msgspec.structs.replace(known, **fields)
