"""A worker's connection to its agent. A background thread listens, so that orders are received while the main thread
computes or waits in a collective; the main thread asks here for its next action.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import selectors
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass

from farandole.base.env import WorkerEnv
from farandole.base.machine import close_at_fork, now_s
from farandole.base.membership import Address, DataAddress, Peer
from farandole.base.wire.frames import TO_WORKER, FrameBuffer, decode, encode, frame
from farandole.base.wire.link_messages import (
    Abort,
    Hello,
    Leaving,
    Left,
    MayPublish,
    Newcomer,
    Prepare,
    Probe,
    Probed,
    PublishAnswer,
    Released,
    Start,
    Stop,
    ToWorker,
    WorkerMessage,
)
from farandole.base.wire.message import PROTOCOL_VERSION
from farandole.base.wire.peer_user import is_of_another_user
from farandole.errors import JobEnded
from farandole.training.collectives.dialer import address_in_use
from farandole.training.worker.worker_recovery import AbortRegistry

_FRAME_LIMIT = 1 << 20
_SLICE_S = 1.0  # waits are cut into slices, so that signals and the end of the job are seen
_CATCH_UP_S = 0.05
_GIVE_WAY_S = 0.0002


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
        self.step = 0  # steps that it had decided at least
        self._start: Start | None = None
        self._released = 0
        self._has_left = False
        self.is_over = False  # the job has ended, or this worker has left it
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
        self._is_obeying = False
        self._arrivals = select.poll()
        self._arrivals.register(self._socket, select.POLLIN)

    def open(self, env: WorkerEnv, address: DataAddress) -> None:
        """Send Hello and start to listen. `address`: where this worker's peers can reach it."""
        self.send(Hello(env.worker, env.secret, os.getpid(), PROTOCOL_VERSION, address))
        self._thread.start()

    def catch_up(self) -> None:
        """Have the link's thread handle what has come. For the main thread, where it can act upon it.

        While the main thread computes in Python, another thread waits for the interpreter, 5 ms at a time, and for a
        processor. A worker that has not noticed an ABORT would run its loop body once more, in vain, and the others
        would wait for it.
        """
        if not (self._is_obeying or self._arrivals.poll(0)):
            return
        deadline_s = now_s() + _CATCH_UP_S  # callbacks of `on_prepare` may take longer
        while (self._is_obeying or self._arrivals.poll(0)) and now_s() < deadline_s:
            threading.Event().wait(_GIVE_WAY_S)

    def send(self, message: WorkerMessage) -> None:
        """Send a message to the coordinator. Never blocks for long: the agent passes it on, on this machine."""
        # An error needs no handling here: the listening thread sees the same end, and acts on it.
        with self._send_lock, contextlib.suppress(OSError):
            self._socket.sendall(frame(encode(message)))

    def ask_to_leave(self) -> None:
        """Ask to leave, from a signal handler: the link's thread sends it, since the main thread may hold the lock."""
        with contextlib.suppress(BlockingIOError):
            self._wake_write.send(b"L")

    def wait_for_start(self, above: int) -> Start | int:
        """Block until there is a START, or an ABORT with a number above `above` (then that number).

        The coordinator bounds the wait: it ends the job when it cannot continue. Raises JobEnded, and SystemExit once
        this worker may leave.
        """
        with self._changed:
            self._wait_until(lambda: self._has_newest_start() or self.ordered > above)
            return self._take_start() if self._has_newest_start() else self.ordered

    def wait_for_admission(self) -> Start | None:
        """Block until the job's first START; None for a newcomer, which is admitted later."""
        with self._changed:
            self._wait_until(lambda: self._start is not None or self.is_newcomer)
            return self._take_start() if self._start is not None else None

    def wait_for_abort(self, above: int) -> int:
        """Block until an ABORT with a number above `above`, after a failed collective, which is only a hint."""
        with self._changed:
            self._wait_until(lambda: self.ordered > above)
            return self.ordered

    def _wait_until(self, is_met: Callable[[], bool]) -> None:
        self._raise_if_over()
        while not is_met():
            self._changed.wait(_SLICE_S)
            self._raise_if_over()

    def _has_newest_start(self) -> bool:
        return self._start is not None and self._start.id.number >= self.ordered

    def _take_start(self) -> Start:
        assert self._start is not None
        start, self._start = self._start, None
        return start

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
                if self.is_over and not self.is_emergency_writer:
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
        buffer = FrameBuffer(_FRAME_LIMIT)
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
                    self._is_obeying = True
                    data = self._receive()
                    if not data:
                        # No process is left that knows the membership: no worker may outlive its agent.
                        self._end_worker("the connection to the agent of this worker is closed; ending the worker")
                        return
                    for payload in buffer.feed(data):
                        self._obey(decode(TO_WORKER, payload))
                    self._is_obeying = False

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
                self.is_newcomer, self.members, self.step = True, message.members, message.step
            elif isinstance(message, Left):
                self._has_left = self.is_over = True
            elif isinstance(message, Stop):
                self.is_emergency_writer = message.saves  # first: a reader of the reason reads this flag next
                self._stop_reason, self.is_over = message.reason, True
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
    if is_of_another_user(connection):
        connection.close()
        raise JobEnded(f"the process that listens at {address} is not of this user: the agent of this worker is gone")
    return connection


# Probes of a worker's neighbours when no byte moves -------------------------------------------------------------------
#
# The results go to the coordinator. The link's thread calls it, so that it works while the main thread is blocked.

LONGEST_PROBE_S = 0.4
"""Seconds for one attempt. A peer that answers at all answers much sooner, on any network that carries gradients."""


@dataclass(frozen=True)
class Connections:
    """The connections of a worker in one generation: the peers, and since when some collective waits on them without a
    byte moved (None: bytes move, or no collective waits)."""

    number: int
    peers: frozenset[Peer]
    still_since_s: float | None


class LinkProbe:
    """Runs each probe in a thread of its own, one at a time.

    budget_s     the detection budget: after half of it without a byte the neighbours are tried, then after twice as
                 long each time, since they may just be slow
    connections  called often; returns None between generations
    report       sends to the coordinator
    own          the address of this worker; None: unknown
    """

    def __init__(
        self,
        budget_s: float,
        connections: Callable[[], Connections | None],
        report: Callable[[Probed], None],
        own: DataAddress | None = None,
    ) -> None:
        self._budget_s, self._connections, self._report = budget_s, connections, report
        self._own = own
        self.look_every_s = min(1.0, budget_s / 16)
        self._still_since_s: float | None = None
        self._pause_s = self._due_s = 0.0
        self._lock = threading.Lock()
        self._is_probing = False

    def look(self) -> bool:
        """Probe if it is time, and return whether it was. Call it every `look_every_s`."""
        now = self._connections()
        since_s = now.still_since_s if now is not None else None
        if since_s != self._still_since_s:
            self._still_since_s = since_s
            self._pause_s = self._budget_s / 2
            self._due_s = 0.0 if since_s is None else since_s + self._pause_s
        if now is None or since_s is None or now_s() < self._due_s or not self._start(now):
            return False
        self._pause_s *= 2
        self._due_s = now_s() + self._pause_s
        return True

    def probe(self, number: int) -> None:
        """Probe now, if this is the generation: the coordinator asks, or a connection has failed. From any thread."""
        now = self._connections()
        if now is not None and now.number == number:
            self._start(now)

    def _start(self, now: Connections) -> bool:
        with self._lock:
            if self._is_probing or not now.peers:
                return False
            self._is_probing = True
        try:
            threading.Thread(target=self._probe, args=(now,), name="farandole-probe", daemon=True).start()
        except RuntimeError:  # the system's limit of threads is reached; the next look tries again
            with self._lock:
                self._is_probing = False
            return False
        return True

    def _probe(self, now: Connections) -> None:
        try:
            address_of = {peer.worker: address_in_use(peer.address, self._own) for peer in now.peers}
            found = find_answering(set(address_of.values()), min(self._budget_s / 4, LONGEST_PROBE_S))
            names = {worker for worker, address in address_of.items() if address in found}
            others = address_of.keys() - names
        finally:
            with self._lock:
                self._is_probing = False
        self._report(Probed(now.number, tuple(sorted(names)), tuple(sorted(others))))


# Connection attempts --------------------------------------------------------------------------------------------------
#
# They test which addresses can be reached now, and answer. A TCP handshake needs both directions, and only the kernel
# at the other end: a process that computes, or holds its interpreter for minutes, answers all the same. An attempt
# leaves nothing there: it ends with a reset, and a listener that waits for a caller's first bytes then forgets it
# (ring_builder.py). Leftover attempts would fill its queue, stall after stall, until the kernel drops new ones, and
# that looks like a broken link.

ATTEMPTS = 6
"""The number of connection attempts at each address, one after the other: packets get lost on working links, too, and
the kernel retransmits a lost SYN only after a second (RFC 6298; TCP_TIMEOUT_INIT in Linux, include/net/tcp.h)."""

_SPREAD = 0.6  # the last attempt is made after this fraction of the time

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER (man 7 socket): on, within 0 s

# An answer of the other end's kernel: no process listens there any more. The process is gone, the link works.
_ANSWERS = (0, errno.ECONNREFUSED, errno.ECONNRESET)


def find_answering(addresses: Collection[Address], within_s: float) -> set[Address]:
    """Return the addresses that answer within `within_s` seconds, at once when all have. A silent one has the whole
    time."""
    begin_s, made = now_s(), 0
    with contextlib.closing(_Attempts(addresses)) as attempts:
        while attempts.unanswered:
            passed_s = now_s() - begin_s
            if made < ATTEMPTS and passed_s >= within_s * _SPREAD * made / ATTEMPTS:
                made += 1
                attempts.dial()
            next_s = within_s if made == ATTEMPTS else within_s * _SPREAD * made / ATTEMPTS
            attempts.wait(max(0.0, next_s - passed_s))
            if passed_s >= within_s:
                break  # only now: all answers that had come by then were read, even if this thread itself was late
        return set(addresses) - attempts.unanswered


class _Attempts:
    """The connection attempts in progress. `unanswered`: addresses that have not answered yet."""

    def __init__(self, addresses: Collection[Address]) -> None:
        self.unanswered = set(addresses)
        self._by_descriptor: dict[int, tuple[socket.socket, Address]] = {}
        self._poll = select.poll()

    def dial(self) -> None:
        """Start one more attempt at each unanswered address."""
        for address in list(self.unanswered):
            sock = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            close_at_fork(sock)
            code = sock.connect_ex((address.host, address.port))
            if code == errno.EINPROGRESS:
                self._by_descriptor[sock.fileno()] = (sock, address)
                self._poll.register(sock, select.POLLOUT)
                continue
            sock.close()
            self._note_answer(address, code)

    def wait(self, timeout_s: float) -> None:
        """Wait until an answer comes, or `timeout_s` seconds have passed."""
        for descriptor, _ in self._poll.poll(timeout_s * 1000):
            self._poll.unregister(descriptor)
            sock, address = self._by_descriptor.pop(descriptor)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            sock.close()
            self._note_answer(address, code)

    def close(self) -> None:
        for sock, _ in self._by_descriptor.values():
            sock.close()

    def _note_answer(self, address: Address, code: int) -> None:
        if code in _ANSWERS:
            self.unanswered.discard(address)
