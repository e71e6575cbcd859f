"""The store of a job: a server for torch's TCPStore clients, at MASTER_ADDR:MASTER_PORT of each worker. server.py opens
it in the coordinator's process, so that it outlives all workers.

The protocol (store_connection.py) has no authentication: whoever may connect may read and write. So it listens on
loopback, or only serves the hosts of the job's agents.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from typing import Protocol

from farandole.base.events.job_events import ConnectionRefused
from farandole.base.membership import Address
from farandole.base.wire.listening import REPORTS_EVERY_S, FailureBudget, Listener, RefusalReports, Strangers
from farandole.base.wire.peer_user import is_of_another_user
from farandole.base.wire.sockets import listening_sockets
from farandole.errors import ConfigError
from farandole.job.coordinator.store_connection import StoreConnection
from farandole.job.coordinator.store_table import StoreTable

CONNECTIONS_LIMIT = 16_384


class Store(Protocol):
    """The part of StoreServer that a coordinator needs."""

    async def open(self, *hosts: str) -> None: ...

    @property
    def address(self) -> Address: ...

    def admit(self, host: str) -> None: ...

    def clear(self) -> None: ...

    def close(self) -> None: ...


class StoreServer:
    """The server, used on one event loop: `await open()`, then `close()`. `on_event` gets a ConnectionRefused for a
    connection that was closed for a violation: of many only some, and their number."""

    def __init__(self, on_event: Callable[[ConnectionRefused], None]) -> None:
        self._reports = RefusalReports(on_event)
        self._flushing: asyncio.TimerHandle | None = None
        self._admitted: set[str] = set()
        self._budget = FailureBudget()
        self._listener = Listener(self._on_connection, self._budget)
        self.table = StoreTable()
        self._connections: set[StoreConnection] = set()
        self._strangers: Strangers[StoreConnection] = Strangers(StoreConnection.close, self._budget)
        self._opening: set[asyncio.Task[None]] = set()

    async def open(self, *hosts: str, port: int = 0) -> None:
        """Listen on one port of these addresses; port 0 lets the system choose. Raises ConfigError when that fails. A
        later call adds addresses."""
        known = self._listener.addresses
        try:
            sockets = listening_sockets(hosts, known[0].port if known else port)
        except OSError as error:
            raise ConfigError(
                f"the store of torch.distributed cannot listen on {' and '.join(hosts)} port {port}: {error.strerror}; "
                "choose another port, or let the system choose a free one"
            ) from error
        self._listener.open(sockets)

    @property
    def address(self) -> Address:
        """The first address at which it listens."""
        assert self._listener.addresses, "call open() first"
        return self._listener.addresses[0]

    @property
    def addresses(self) -> tuple[Address, ...]:
        """All addresses at which it listens."""
        return self._listener.addresses

    @property
    def connections(self) -> int:
        return len(self._connections)

    def admit(self, host: str) -> None:
        """Serve the host of this address, too: it is one of the job's. Loopback is always served."""
        self._admitted.add(host)

    def clear(self) -> None:
        """Forget all entries and close all connections: for workers that are all started anew, on the same port."""
        for connection in list(self._connections):
            connection.close()
        self.table = StoreTable()

    def close(self) -> None:
        """Stop listening and close all connections. Idempotent."""
        self._listener.close()
        self.clear()
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        self._reports.finish()

    def _on_connection(self, connected: socket.socket, who: str) -> None:
        is_stranger = is_of_another_user(connected)
        another = "it is a process of another user, or has ended"
        if reason := another if is_stranger else self.why_not(who.rpartition(":")[0]):
            if not _has_only_looked(connected):
                self.refused(who, reason)
            connected.close()
            self._budget.count()
            return
        loop = asyncio.get_running_loop()
        opening = loop.create_task(self._open(connected))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def _open(self, connected: socket.socket) -> None:
        await asyncio.get_running_loop().connect_accepted_socket(lambda: StoreConnection(self), connected)

    # From the connections ---------------------------------------------------------------------------------

    def why_not(self, host: str) -> str:
        """Return why a new connection from this host is refused; empty if it is accepted."""
        if not (_is_loopback(host) or host in self._admitted):
            return "it comes from a host that is not part of the job"
        if len(self._connections) >= CONNECTIONS_LIMIT:
            return f"{CONNECTIONS_LIMIT} other connections are open"
        return ""

    def opened(self, connection: StoreConnection) -> None:
        self._connections.add(connection)
        self._strangers.add(connection)

    def validated(self, connection: StoreConnection) -> None:
        self._strangers.proved(connection)

    def closed(self, connection: StoreConnection) -> None:
        self._connections.discard(connection)
        self._strangers.failed(connection)

    def refused(self, peer: str, reason: str) -> None:
        self._reports(ConnectionRefused(f"{peer} to the store of torch.distributed", reason))
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(REPORTS_EVERY_S, self._flush)

    def _flush(self) -> None:
        self._flushing = None
        self._reports.finish()


def _has_only_looked(connected: socket.socket) -> bool:
    """Return whether a connection has ended without a byte, as those that test a port do."""
    try:
        return connected.recv(1, socket.MSG_PEEK) == b""
    except OSError:
        return False


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
