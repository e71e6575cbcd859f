"""Probes of a worker's neighbours when no byte moves; the results go to the coordinator. The link's thread calls it, so
that it works while the main thread is blocked.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import struct
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass

from farandole.clock import now_s
from farandole.fork_safety import close_at_fork
from farandole.membership import Address, Peer
from farandole.wire.messages import Probed

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
    tell         sends to the coordinator
    """

    def __init__(
        self, budget_s: float, connections: Callable[[], Connections | None], report: Callable[[Probed], None]
    ) -> None:
        self._budget_s, self._connections, self._report = budget_s, connections, report
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
            by_address = {peer.address: peer.worker for peer in now.peers}
            found = find_answering(by_address, min(self._budget_s / 4, LONGEST_PROBE_S))
            names = {by_address[address] for address in found}
            others = set(by_address.values()) - names
        finally:
            with self._lock:
                self._is_probing = False
        self._report(Probed(now.number, tuple(sorted(names)), tuple(sorted(others))))


# Connection attempts --------------------------------------------------------------------------------------------------
#
# They test which addresses can be reached now, and answer. A TCP handshake needs both directions, and only the kernel
# at the other end: a process that computes, or holds its interpreter for minutes, answers all the same. An attempt
# leaves nothing there: it ends with a reset, and a listener that waits for a caller's first bytes then forgets it
# (data_connections.py). Leftover attempts would fill its queue, stall after stall, until the kernel drops new ones, and
# that looks like a broken link.

ATTEMPTS = 6
"""The number of connection attempts at each address, one after the other: packets get lost on working links, too, and
the kernel retransmits a lost SYN only after a second (RFC 6298; TCP_TIMEOUT_INIT in Linux, include/net/tcp.h)."""

_SPREAD = 0.6  # the last attempt is made after this fraction of the time

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER (man 7 socket): on, within 0 s

# An answer of the other end's kernel: no process listens there any more. The process is gone, the link works.
_ANSWERS = (0, errno.ECONNREFUSED, errno.ECONNRESET)


def find_answering(addresses: Collection[Address], within_s: float) -> set[Address]:
    """Return the addresses that answer within `within_s` seconds, at once when all have.

    An address that does not answer is given the whole time.
    """
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
