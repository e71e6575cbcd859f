"""Which of some addresses can be reached now, and reach back. worker/prober.py asks when nothing moves.

A TCP handshake takes both directions, and nothing but the kernel at the other end: a process that computes, or holds
its interpreter for minutes, answers all the same.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
from collections.abc import Collection

from farandole.clock import now_s
from farandole.fork_safety import close_at_fork
from farandole.membership import Address

ATTEMPTS = 6
"""Connections that are tried at each address, one after the other: packets get lost where nothing is broken, and the
kernel repeats one that was lost after a second only."""

_SPREAD = 0.6  # the last attempt is made after this part of the time

# From the other end's kernel: nobody listens there any more. That is news of a process, not of a link.
_ANSWERS = (0, errno.ECONNREFUSED, errno.ECONNRESET)


def answering(addresses: Collection[Address], within_s: float) -> set[Address]:
    """Those that answer within so many seconds; returns at once when all have. What does not answer is given all the
    time there is."""
    begin_s = now_s()
    left, found = set(addresses), set[Address]()
    attempts: dict[int, tuple[socket.socket, Address]] = {}
    made = 0
    poll = select.poll()
    with contextlib.ExitStack() as cleanup:
        while left:
            now = now_s() - begin_s
            if made < ATTEMPTS and now >= within_s * _SPREAD * made / ATTEMPTS:
                made += 1
                for address in list(left):
                    sock = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
                    cleanup.callback(sock.close)
                    sock.setblocking(False)
                    close_at_fork(sock)
                    code = sock.connect_ex((address.host, address.port))
                    if code == errno.EINPROGRESS:
                        attempts[sock.fileno()] = (sock, address)
                        poll.register(sock, select.POLLOUT)
                    elif code in _ANSWERS:
                        left.discard(address)
                        found.add(address)
            is_last_look = now >= within_s
            next_s = within_s if made == ATTEMPTS else within_s * _SPREAD * made / ATTEMPTS
            # What has come is read even when this thread itself is late.
            for descriptor, _ in poll.poll(0 if is_last_look else max(1.0, (next_s - now) * 1000)):
                sock, address = attempts.pop(descriptor)
                poll.unregister(sock)
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _ANSWERS:
                    left.discard(address)
                    found.add(address)
            if is_last_look:
                break
    return found
