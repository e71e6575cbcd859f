"""A worker's connection to its agent. A background thread listens, so that orders are received while the main thread
computes or waits in a collective; the main thread asks here for its next action."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable

from farandole.clock import now_s
from farandole.env import WorkerEnv
from farandole.errors import JobEnded
from farandole.fork_safety import close_at_fork
from farandole.membership import Address
from farandole.wire import codec
from farandole.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    Hello,
    Leaving,
    Left,
    MayPublish,
    Newcomer,
    Prepare,
    Probe,
    PublishAnswer,
    Released,
    Start,
    Stop,
    ToWorker,
    WorkerMessage,
)
from farandole.worker.abort_registry import AbortRegistry

_FRAME_LIMIT = 1 << 20
_SLICE_S = 1.0  # waits are cut into slices, so that signals and the end of the job are seen


class Link:
    """The connection to the agent, from init() to shutdown().

    Orders are kept, newest first: `ordered` is the number of the newest ABORT, `prepared` that of the newest PREPARE
    which no ABORT has overtaken. An ABORT ends the calls in which the main thread is blocked, by way of `aborts`.
    `on_prepare`, where set, runs on the link's thread for each PREPARE; `on_probe` for each PROBE, and `on_look` every
    `look_every_s` seconds at least.
    """

    def __init__(self, env: WorkerEnv, aborts: AbortRegistry) -> None:
        self._aborts = aborts
        self.on_prepare: Callable[[Prepare], None] | None = None
        self.on_probe: Callable[[int], None] = lambda _number: None
        self.on_look: Callable[[], object] = lambda: None
        self.look_every_s = _SLICE_S
        self._changed = threading.Condition()
        self._send_lock = threading.Lock()
        self.ordered = 0
        self.prepared = 0
        self.aborted_s = 0.0  # when the newest ABORT came
        self.is_newcomer = False
        self.members = 0  # of the generation that this worker has joined as a newcomer
        self._start: Start | None = None
        self._released = 0
        self._has_left = False
        self._stop_reason: str | None = None
        self.is_emergency_writer = False  # the job ends, and this worker is to save the state
        self._answers: dict[str, str] = {}
        self._socket = _dial(env.agent_address)
        close_at_fork(self._socket)
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
            close_at_fork(end)
        self._pid = os.getpid()
        self._closing = False
        self._thread = threading.Thread(target=self._listen, name="farandole-link", daemon=True)

    def open(self, env: WorkerEnv, address: Address) -> None:
        """Send Hello and start to listen. `address`: where this worker's peers can reach it."""
        self.send(Hello(env.worker, env.secret, os.getpid(), PROTOCOL_VERSION, address))
        self._thread.start()

    def send(self, message: WorkerMessage) -> None:
        """Send a message to the coordinator, through the agent. Never blocks for long: both ends are on this
        machine."""
        # An error needs no handling here: the listening thread sees the same end, and acts on it.
        with self._send_lock, contextlib.suppress(OSError):
            self._socket.sendall(codec.frame(codec.encode(message)))

    def ask_to_leave(self) -> None:
        """Ask to leave, from a signal handler: the link's thread sends Leaving, since the main thread may hold the
        lock."""
        with contextlib.suppress(BlockingIOError):
            self._wake_write.send(b"L")

    def is_over(self) -> bool:
        """Return whether the job has ended, or this worker has left it."""
        return self._stop_reason is not None or self._has_left

    def wait_for_start(self, above: int) -> Start | int:
        """Block until there is a START, or an ABORT with a number above `above` (then that number).

        The coordinator bounds the wait: it ends the job when it cannot continue. Raises JobEnded, and SystemExit once
        this worker may leave.
        """
        with self._changed:
            while True:
                self._raise_if_over()
                if self._start is not None and self._start.id.number >= self.ordered:
                    start, self._start = self._start, None
                    return start
                if self.ordered > above:
                    return self.ordered
                self._changed.wait(_SLICE_S)

    def wait_for_admission(self) -> Start | None:
        """Block until the job's first START; None for a newcomer, which is admitted later."""
        with self._changed:
            while True:
                self._raise_if_over()
                if self._start is not None:
                    start, self._start = self._start, None
                    return start
                if self.is_newcomer:
                    return None
                self._changed.wait(_SLICE_S)

    def wait_for_abort(self, above: int) -> int:
        """Block until an ABORT with a number above `above`, after a failed collective, which is only a hint."""
        with self._changed:
            while True:
                self._raise_if_over()
                if self.ordered > above:
                    return self.ordered
                self._changed.wait(_SLICE_S)

    def wait_for_release(self, number: int) -> bool:
        """Block until all members have finished generation `number` (True), or it was aborted (False)."""
        with self._changed:
            while True:
                if self._released >= number:
                    return True
                self._raise_if_over()
                if self.ordered > number:
                    return False
                self._changed.wait(_SLICE_S)

    def may_publish(self, asked: MayPublish, timeout_s: float) -> str:
        """Ask the coordinator whether a checkpoint counts. Return "", or the reason for a refusal. From any thread."""
        self.send(asked)
        name = asked.name
        deadline_s = now_s() + timeout_s
        with self._changed:
            while name not in self._answers:
                if now_s() >= deadline_s:
                    return f"the coordinator did not answer within {timeout_s:g} s"
                if self.is_over() and not self.is_emergency_writer:
                    return "the job is over for this worker"
                self._changed.wait(min(_SLICE_S, timeout_s))
            return self._answers.pop(name)

    def raise_if_over(self) -> None:
        """Raise JobEnded or SystemExit when this worker has no work left."""
        with self._changed:
            self._raise_if_over()

    def close(self) -> None:
        """Close the connection. Messages sent before still arrive. Idempotent."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join(_SLICE_S)
        for each in (self._socket, self._wake_read, self._wake_write):
            each.close()

    def _raise_if_over(self) -> None:
        if self._stop_reason is not None:
            raise JobEnded(self._stop_reason)
        if self._has_left:
            raise SystemExit(0)

    # The link's thread -----------------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            self._follow_orders()
        except BaseException:  # noqa: BLE001 - better lost than deaf: the others wait for who hears no ABORT
            self._end_worker(f"its link to the agent failed; ending the worker\n{traceback.format_exc()}")

    def _follow_orders(self) -> None:
        buffer = codec.FrameBuffer(_FRAME_LIMIT)
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            while True:
                self.on_look()
                for key, _ in selector.select(self.look_every_s):
                    if key.fileobj is self._wake_read:
                        self._wake_read.recv(16)
                        self.send(Leaving())
                        continue
                    data = self._receive()
                    if not data:
                        # No process is left that knows the membership: no worker may outlive its agent.
                        self._end_worker("the connection to the agent of this worker is closed; ending the worker")
                        return
                    for payload in buffer.feed(data):
                        self._obey(codec.decode(codec.TO_WORKER, payload))

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(1 << 16)
        except OSError:
            return b""

    def _obey(self, message: ToWorker) -> None:
        with self._changed:
            if isinstance(message, Abort):
                if message.number <= self.ordered:
                    return
                self.ordered, self.prepared = message.number, 0
                self.aborted_s = now_s()
                self._aborts.abort_below(message.number, message.reason)
            elif isinstance(message, Prepare):
                self.prepared = message.number if message.number > self.ordered else 0
                if self.prepared and self.on_prepare is not None:
                    self.on_prepare(message)
            elif isinstance(message, Probe):
                self.on_probe(message.number)
            elif isinstance(message, Start):
                self._start, self.prepared = message, 0
            elif isinstance(message, Released):
                self._released = message.number
            elif isinstance(message, Newcomer):
                self.is_newcomer, self.members = True, message.members
            elif isinstance(message, Left):
                self._has_left = True
            elif isinstance(message, Stop):
                self.is_emergency_writer = message.saves  # first: a reader of the reason reads this flag next
                self._stop_reason = message.reason
                self._aborts.abort_all(message.reason)
            elif isinstance(message, PublishAnswer):
                self._answers[message.name] = message.refusal
            self._changed.notify_all()

    def _end_worker(self, why: str) -> None:
        """End the worker, unless close() has caused the end of the connection."""
        if self._closing or os.getpid() != self._pid:
            return
        with contextlib.suppress(Exception):  # the reader of stderr may be gone, too
            print(f"farandole: {why}", file=sys.stderr, flush=True)
        if os.getsid(0) == os.getpgrp():  # the agent gave this worker a session of its own
            os.killpg(os.getpgrp(), signal.SIGKILL)  # its loader workers too
        os._exit(1)


def _dial(address: str, timeout_s: float = 10.0) -> socket.socket:
    """Connect to the agent's unix socket; an address that begins with @ is abstract (no file)."""
    path: str | bytes = b"\0" + address[1:].encode() if address.startswith("@") else address
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    begin = now_s()
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise JobEnded(
            f"the agent of this worker does not answer at {address} ({error}, {now_s() - begin:.1f} s); a script "
            f"that outlives its `farandole run` cannot call init() again"
        ) from error
    connection.settimeout(None)
    return connection
