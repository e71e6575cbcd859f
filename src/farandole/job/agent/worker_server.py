"""The socket to which the workers of one agent connect: a unix socket that serves only processes of the same user that
also know the secret of their worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hmac
import mmap
import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable

import msgspec

from farandole.base.liveness import exit_notice
from farandole.base.liveness.status_reporting import MUTEX_AT, StatusPage
from farandole.base.membership import Meeting, WorkerStatus
from farandole.base.wire.frames import WORKER_FRAME_LIMIT, WORKER_MESSAGES, FrameBuffer, decode, encode, frame
from farandole.base.wire.link_messages import Hello, ToWorker, WorkerMessage
from farandole.base.wire.listening import FailureBudget, Listener, Strangers
from farandole.base.wire.message import PROTOCOL_VERSION
from farandole.base.wire.peer_user import is_of_another_user
from farandole.errors import AuthenticationError, FatalError, ProtocolError

HELLO_DEADLINE_S = 5.0
"""Seconds within which a connected process must send its Hello."""

_HELLO_BYTES = 1 << 14
"""The largest Hello."""


class WorkerServer:
    """Listens from `start` to `stop` at `address`.

    `on_message(worker, message)` gets every valid message, the Hello first and without its secret; `on_refused(who,
    reason)` is called for each connection that was ended because of a wrong or missing message.
    """

    def __init__(
        self,
        on_message: Callable[[str, WorkerMessage], None],
        on_refused: Callable[[str, str], None],
        has_abstract_sockets: bool = sys.platform == "linux",
    ) -> None:
        self.address = ""
        self._has_abstract_sockets = has_abstract_sockets
        self._on_message, self._on_refused = on_message, on_refused
        self._secrets: dict[str, str] = {}
        self._connections: dict[str, WorkerConnection] = {}
        self._budget = FailureBudget()
        self._strangers: Strangers[WorkerConnection] = Strangers(self._make_room, self._budget)
        self._deadlines: dict[WorkerConnection, asyncio.TimerHandle] = {}
        self._listener = Listener(self._on_connection, self._budget)
        self._directory: str | None = None

    def start(self) -> None:
        """Listen. An abstract address needs no file, so a killed agent leaves none behind; where the system has none
        (macOS) it is a file in a directory that only this user can enter."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if self._has_abstract_sockets:
            self.address = f"@farandole-{secrets.token_hex(16)}"
            listening.bind(b"\0" + self.address[1:].encode())
        else:
            self._directory = tempfile.mkdtemp(prefix="farandole-")
            self.address = os.path.join(self._directory, "agent")
            listening.bind(self.address)
        self._listener.open([listening])

    def expect(self, worker: str) -> str:
        """Return a new secret with which the process of `worker` may connect."""
        self._secrets[worker] = secrets.token_hex(32)
        return self._secrets[worker]

    def send_to(self, workers: Iterable[str], message: ToWorker) -> None:
        """Write `message` to each of these workers that is connected. The others miss it for good: the answer to a
        Hello carries all that a worker has to know."""
        data = frame(encode(message))
        for worker in workers:
            if (connection := self._connections.get(worker)) is not None:
                connection.write(data)

    def read_rest(self, worker: str) -> None:
        """Pass on the messages that the worker has sent so far."""
        if (connection := self._connections.get(worker)) is not None:
            connection.read_rest()

    def dismiss(self, worker: str) -> None:
        """Pass on the last messages of a worker whose process has ended, then close its connection for good."""
        self.read_rest(worker)
        if (connection := self._connections.get(worker)) is not None:
            connection.close()
        self._connections.pop(worker, None)
        self._secrets.pop(worker, None)

    def stop(self) -> None:
        """Close all connections and stop listening. Idempotent."""
        self._listener.close()
        for connection in [*self._connections.values(), *self._strangers]:
            self._forget_stranger(connection)
            connection.close()
        self._connections.clear()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    # A connection is unknown until its Hello, then a worker's ---------------------------------------------

    def _on_connection(self, connected: socket.socket, _: str) -> None:
        if is_of_another_user(connected):
            connected.close()
            self._budget.count()
            self._on_refused("a process of another user", "only processes of the agent's user may connect to it")
            return
        stranger = WorkerConnection(connected, self._on_payload, self._on_end)
        self._deadlines[stranger] = asyncio.get_running_loop().call_later(HELLO_DEADLINE_S, self._give_up, stranger)
        self._strangers.add(stranger)

    def _make_room(self, stranger: WorkerConnection) -> None:
        stranger.close()
        self._on_end(stranger, ProtocolError(f"it sent no Hello, nor did {len(self._strangers)} newer ones"))

    def _forget_stranger(self, connection: WorkerConnection) -> None:
        self._strangers.failed(connection)
        if (deadline := self._deadlines.pop(connection, None)) is not None:
            deadline.cancel()

    def _on_payload(self, connection: WorkerConnection, payload: bytes) -> None:
        message = decode(WORKER_MESSAGES, payload)
        if connection.worker is None:
            message = self._admit(connection, message)
        elif isinstance(message, Hello):
            raise ProtocolError("it sent Hello twice")
        assert connection.worker is not None
        self._on_message(connection.worker, message)

    def _admit(self, stranger: WorkerConnection, message: WorkerMessage) -> Hello:
        """Return the worker's Hello without its secret."""
        if not isinstance(message, Hello):
            raise ProtocolError(f"it sent {type(message).__name__} before Hello")
        if message.version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"it uses version {message.version} of the protocol, its agent version {PROTOCOL_VERSION}; "
                "install the same version of Farandole for both"
            )
        secret = self._secrets.get(message.worker)
        if secret is None or not hmac.compare_digest(secret.encode(), message.secret.encode()):
            raise AuthenticationError(f"it did not send the secret of worker {message.worker}")
        if message.worker in self._connections:
            # A child that inherited the environment must not take the place of its parent.
            raise ProtocolError(f"worker {message.worker} is connected already")
        self._strangers.proved(stranger)
        self._forget_stranger(stranger)
        self._connections[message.worker] = stranger
        stranger.become(message.worker)
        return msgspec.structs.replace(message, secret="")

    def _give_up(self, stranger: WorkerConnection) -> None:
        stranger.close()
        self._on_end(stranger, ProtocolError(f"it sent no Hello within {HELLO_DEADLINE_S:g} s"))

    def _on_end(self, connection: WorkerConnection, error: FatalError | None) -> None:
        """Forget a connection that has ended. Only the exit tells whether the process lives."""
        self._forget_stranger(connection)
        if connection.worker is not None:
            del self._connections[connection.worker]
        if error is not None:
            who = f"worker {connection.worker}" if connection.worker else "a process on the agent's socket"
            self._on_refused(who, str(error))


# The connection of one worker: frames in, frames out, directly on the event loop's selector ---------------------------
#
# No streams and no tasks in between: an ABORT must reach a blocked worker at once, and the last message of a process
# must be readable at the moment when it is known to have ended.

_READ_BYTES = 1 << 16
_UNREAD_LIMIT = 4 * WORKER_FRAME_LIMIT


class WorkerConnection:
    """Calls `on_payload(connection, payload)` for each frame; it may raise a FatalError to refuse the frame. Calls
    `on_end(connection, error)` once, when the connection has ended by itself: `error` is None at the end of the stream,
    otherwise the cause. The socket is closed by then."""

    def __init__(
        self,
        connected: socket.socket,
        on_payload: Callable[[WorkerConnection, bytes], None],
        on_end: Callable[[WorkerConnection, FatalError | None], None],
    ) -> None:
        self.worker: str | None = None  # known from its Hello on
        self._socket = connected
        self._on_payload, self._on_end = on_payload, on_end
        self._incoming = FrameBuffer(_HELLO_BYTES)
        self._outgoing = bytearray()
        self._is_open = True
        self._loop = asyncio.get_running_loop()
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._read)

    def become(self, worker: str) -> None:
        """Note whose connection it is: from now on it may send large messages."""
        self.worker = worker
        self._incoming.limit = WORKER_FRAME_LIMIT

    def write(self, data: bytes) -> None:
        """Pass `data` to the kernel now, or as soon as it takes more. Does nothing once the connection has ended."""
        if not self._is_open:
            return
        waiting = bool(self._outgoing)
        self._outgoing += data
        if not waiting and not self._send():
            self._loop.add_writer(self._socket, self._send_rest)
        if len(self._outgoing) > _UNREAD_LIMIT:
            self._end(ProtocolError(f"it has not read {len(self._outgoing)} bytes of messages"))

    def read_rest(self) -> None:
        """Read all that has arrived, without waiting for more."""
        while self._is_open and self._read():
            pass

    def close(self) -> None:
        """Close the connection without a call of `on_end`. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()

    def _read(self) -> bool:
        """Read once; return False when there was no data."""
        try:
            # Of a stranger not one byte more than its Hello: larger messages may follow.
            data = self._socket.recv(_READ_BYTES if self.worker is not None else self._incoming.missing)
        except BlockingIOError:
            return False
        except OSError:  # reset by a process that was killed before it had read everything
            data = b""
        if not data:
            self._end(None)
            return False
        try:
            for payload in self._incoming.feed(data):
                if self._is_open:
                    self._on_payload(self, payload)
        except FatalError as error:
            self._end(error)
        return True

    def _send(self) -> bool:
        """Send as much as the kernel takes; return True when nothing is left."""
        try:
            sent = self._socket.send(self._outgoing)
        except BlockingIOError:
            return False
        except OSError:
            sent = len(self._outgoing)  # the reader is gone; the end of the stream is about to arrive
        del self._outgoing[:sent]
        return not self._outgoing

    def _send_rest(self) -> None:
        if self._send():
            self._loop.remove_writer(self._socket)

    def _end(self, error: FatalError | None) -> None:
        if self._is_open:
            self.close()
            self._on_end(self, error)


# The status pages of this agent's workers: their statuses, and the beginning of their exits ---------------------------


class StatusPages:
    """The status pages, used on one event loop. `on_exit_notice(worker)`: its main thread has apparently begun to
    end."""

    def __init__(self, on_exit_notice: Callable[[str], None]) -> None:
        self._on_exit_notice = on_exit_notice
        self.by_worker: dict[str, StatusPage] = {}
        self._meetings: dict[str, Meeting] = {}
        self._deaths: ExitWatcher | None = None

    def start(self) -> None:
        if exit_notice.is_supported():
            loop = asyncio.get_running_loop()

            def marked(worker: str) -> None:
                with contextlib.suppress(RuntimeError):  # the loop was closed before
                    loop.call_soon_threadsafe(self._hint, worker)

            self._deaths = ExitWatcher(marked)
            self._deaths.start()

    def add(self, worker: str) -> str:
        """Create a page for this worker and return its address; empty if there is none."""
        try:
            page = StatusPage()
        except OSError:
            return ""
        self.by_worker[worker] = page
        if self._deaths is not None:
            self._deaths.watch(worker, page.memory, MUTEX_AT)
        return page.path

    def look(self) -> dict[str, WorkerStatus]:
        """Return the statuses of the workers that have reported one."""
        looks = ((worker, page.look()) for worker, page in self.by_worker.items())
        return {worker: seen for worker, seen in looks if seen is not None}

    def new_meetings(self) -> dict[str, Meeting]:
        """Return, by worker, what has become known since the last call of whether it has met the others."""
        looks = {worker: page.meeting() for worker, page in self.by_worker.items()}
        new = {worker: look for worker, look in looks.items() if look != self._meetings.get(worker, Meeting.UNKNOWN)}
        self._meetings |= new
        return new

    def remove(self, worker: str) -> None:
        self._meetings.pop(worker, None)
        if self._deaths is not None:
            self._deaths.forget(worker)
        if (page := self.by_worker.pop(worker, None)) is not None:
            page.close()

    def stop(self) -> None:
        """Remove all pages. Idempotent."""
        for worker in list(self.by_worker):
            self.remove(worker)
        if self._deaths is not None:
            self._deaths.stop()

    def _hint(self, worker: str) -> None:
        if worker in self.by_worker:
            self._on_exit_notice(worker)


# The thread that detects the beginning of a worker's exit, by the mutexes that the main threads hold ------------------

_SLICE_S = 1.0


class ExitWatcher:
    """Calls `on_mark(worker)` in the thread, once for each worker whose mutex is found marked. At most MOST_WORDS
    workers are watched at a time; any further ones are not."""

    def __init__(self, on_mark: Callable[[str], None]) -> None:
        self._on_mark = on_mark
        self._lock = threading.Lock()
        self._words: dict[str, memoryview] = {}
        self._changes = ctypes.c_uint32(0)  # counts changes of the watched words: the thread looks anew
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="farandole-deaths", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def watch(self, worker: str, memory: mmap.mmap, offset: int) -> None:
        """Watch the worker's mutex at this place, which the worker may lock at any time."""
        with self._lock:
            self._words[worker] = memoryview(memory)[offset:][:4].cast("I")
        self._look_anew()

    def forget(self, worker: str) -> None:
        """Stop watching a worker whose process is gone."""
        with self._lock:
            self._words.pop(worker, None)
        self._look_anew()

    def stop(self) -> None:
        """Stop the thread. Idempotent."""
        self._is_over = True
        self._look_anew()

    def _look_anew(self) -> None:
        with self._lock:
            self._changes.value += 1
        exit_notice.wake(ctypes.addressof(self._changes))

    def _run(self) -> None:
        while not self._is_over:
            with self._lock:
                changes = (ctypes.addressof(self._changes), self._changes.value)
                now = {worker: word[0] for worker, word in self._words.items()}
                marked = [worker for worker, value in now.items() if exit_notice.is_marked(value)]
                # A view is kept for as long as its address is in use: it holds the memory.
                views = [(self._words.pop(each) if each in marked else self._words[each]) for each in now]
            for worker in marked:
                self._on_mark(worker)
            pairs = [(_address(view), value) for view, value in zip(views, now.values(), strict=True)]
            calm = [pair for pair in pairs if not exit_notice.is_marked(pair[1])]
            exit_notice.wait([changes, *calm[: exit_notice.MOST_WORDS]], _SLICE_S)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_uint32.from_buffer(view))
