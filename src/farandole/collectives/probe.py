"""Test which addresses can be reached now, and answer. worker/link_probe.py asks when no data moves.

A TCP handshake needs both directions, and only the kernel at the other end: a process that computes, or holds its
interpreter for minutes, answers all the same. An attempt leaves nothing there: it ends with a reset, and a listener
that waits for a caller's first bytes (listener.py) then forgets it. Leftover attempts would fill its queue, stall after
stall, until the kernel drops new ones, and that looks like a broken link.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import struct
from collections.abc import Collection

from farandole.clock import now_s
from farandole.fork_safety import close_at_fork
from farandole.membership import Address

ATTEMPTS = 6
"""The number of connection attempts at each address, one after the other: packets get lost on working links, too, and
the kernel retransmits a lost one only after a second."""

_SPREAD = 0.6  # the last attempt is made after this fraction of the time

_RESET = struct.pack("ii", 1, 0)  # on, within 0 s

# An answer of the other end's kernel: no process listens there any more. The process is gone, the link works.
_ANSWERS = (0, errno.ECONNREFUSED, errno.ECONNRESET)


def answering(addresses: Collection[Address], within_s: float) -> set[Address]:
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
            self._trailer(address, code)

    def wait(self, timeout_s: float) -> None:
        """Wait until an answer comes, or `timeout_s` seconds have passed."""
        for descriptor, _ in self._poll.poll(timeout_s * 1000):
            self._poll.unregister(descriptor)
            sock, address = self._by_descriptor.pop(descriptor)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            sock.close()
            self._trailer(address, code)

    def close(self) -> None:
        for sock, _ in self._by_descriptor.values():
            sock.close()

    def _trailer(self, address: Address, code: int) -> None:
        if code in _ANSWERS:
            self.unanswered.discard(address)
