"""The coordinator's port: connections from anybody, until the token is proved and a hello says who has dialed."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from farandole.base.config import JobConfig
from farandole.base.events.job_events import ConnectionRefused
from farandole.base.membership import Address
from farandole.base.wire.channel import HANDSHAKE_DEADLINE_S, Channel, accept
from farandole.base.wire.control import ClientHello, ClientMessage
from farandole.base.wire.encryption import Certificates, load_certificates
from farandole.base.wire.frames import DIALERS_MESSAGES
from farandole.base.wire.listening import FailureBudget, Listener, RefusalReports, Strangers
from farandole.base.wire.messages import AgentHello, AgentMessage, GuardHello
from farandole.base.wire.sockets import listening_sockets
from farandole.errors import AuthenticationError, ConfigError, ProtocolError

DialersChannel: TypeAlias = Channel[AgentMessage | GuardHello | ClientMessage]
Hello: TypeAlias = AgentHello | GuardHello | ClientHello


class Reception:
    """Used on one event loop: `await open()`, then `close()`.

    serve     serves a peer whose hello has come, until its connection ends; it calls `introduced`
    on_event  gets refused connections, of many only some, and their number
    fail      called with an internal error that ends the run, not only the connection that met it
    """

    def __init__(
        self,
        config: JobConfig,
        token: bytes,
        job_id: str,
        serve: Callable[[DialersChannel, Hello], Awaitable[None]],
        on_event: Callable[[ConnectionRefused], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._config, self._token, self._job_id = config, token, job_id
        self._serve, self._fail = serve, fail
        self.refused = RefusalReports(on_event)
        self._tls: Certificates | None = None
        self._budget = FailureBudget()
        self._listener = Listener(self._on_connection, self._budget)
        self._strangers: Strangers[asyncio.Task[None]] = Strangers(self._make_room, self._budget)
        self._awaited: set[asyncio.Task[None]] = set()  # of peers that are told the end of the job
        self._others: set[asyncio.Task[None]] = set()  # the end of the connection tells these that the job has ended

    @property
    def addresses(self) -> tuple[Address, ...]:
        """All addresses at which it listens, or did."""
        return self._listener.addresses

    def load_certificates(self) -> None:
        """Raises ConfigError when the job's certificates cannot be used."""
        self._tls = load_certificates(self._config.tls)

    def open(self, hosts: Sequence[str], port: int) -> None:
        """Listen on one port of these addresses; a later call adds addresses on the same port. Raises ConfigError when
        that fails."""
        known = self._listener.addresses
        port = known[0].port if known else port
        try:
            sockets = listening_sockets(hosts, port)
        except OSError as error:
            advice = "choose another --port, or leave it out to get a free one"
            if error.errno == errno.EADDRNOTAVAIL:
                advice = "choose an address of this machine"
            raise ConfigError(
                f"the coordinator cannot listen on {' and '.join(hosts)} port {port}: {error.strerror}; {advice}"
            ) from error
        self._listener.open(sockets)

    def introduced(self, is_awaited: bool) -> None:
        """Note that the peer of the current task is known now, and whether `finish` waits for it."""
        task = asyncio.current_task()
        assert task is not None
        self._strangers.proved(task)
        self._others.discard(task)
        (self._awaited if is_awaited else self._others).add(task)

    def stop_listening(self) -> None:
        """Accept no further connection. Idempotent."""
        self._listener.close()

    async def finish(self, patience_s: float) -> None:
        """Accept no further connection, and wait until the awaited peers have closed theirs, for a limited time."""
        self.stop_listening()
        for each in self._others:
            each.cancel()
        if self._awaited:
            await asyncio.wait(self._awaited, timeout=patience_s)

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        self.stop_listening()
        conversing = {*self._strangers, *self._awaited, *self._others}
        for task in conversing:
            task.cancel()
        await asyncio.gather(*conversing, return_exceptions=True)

    def _on_connection(self, connected: socket.socket, who: str) -> None:
        task = asyncio.get_running_loop().create_task(self._converse(connected, who), name=who)
        task.add_done_callback(self._on_conversation_over)
        task.add_done_callback(lambda _: connected.close())  # also of a task that was cancelled before it began
        self._strangers.add(task)

    def _make_room(self, stranger: asyncio.Task[None]) -> None:
        stranger.cancel()
        newer = f"{len(self._strangers)} newer connections have not proved the token either"
        self.refused(ConnectionRefused(stranger.get_name(), f"it has not proved the token, and {newer}"))

    def _on_conversation_over(self, task: asyncio.Task[None]) -> None:
        self._strangers.failed(task)
        self._awaited.discard(task)
        self._others.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _converse(self, connected: socket.socket, who: str) -> None:
        try:
            channel = await accept(connected, self._token, self._job_id, DIALERS_MESSAGES, self._tls)
            try:
                await self._serve(channel, await _receive_hello(channel))
            finally:
                channel.abort()
        except (AuthenticationError, ProtocolError) as error:
            self.refused(ConnectionRefused(who, str(error)))
        except ConnectionError as error:
            # An agent is judged by its silence; a guard ends with its agent; a command is done.
            if (task := asyncio.current_task()) is not None and task in self._strangers:
                self.refused(ConnectionRefused(who, str(error)))


async def _receive_hello(channel: DialersChannel) -> Hello:
    try:
        async with asyncio.timeout(HANDSHAKE_DEADLINE_S):
            message = await channel.receive()
    except TimeoutError:
        raise ConnectionError(f"it sent no AgentHello within {HANDSHAKE_DEADLINE_S:g} s") from None
    if not isinstance(message, AgentHello | GuardHello | ClientHello):
        raise ProtocolError(f"it sent {type(message).__name__} before AgentHello")
    return message
