"""What an authenticated connection tells whoever receives on it, when the kernel gives it up."""

from __future__ import annotations

import asyncio
import errno
import socket

import pytest

from farandole.base.wire.authentication import Proofs, Role, Session
from farandole.base.wire.channel import Channel
from farandole.base.wire.frames import TO_AGENT
from farandole.base.wire.sockets import keep_alive
from tests.support.waiting import run


def proved() -> Session:
    """A listener's, whose dialer has proved the token."""
    return Proofs(b"token", b"control").session(Role.LISTENER)


@pytest.mark.parametrize("number", [errno.ECONNRESET, errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETDOWN])
def test_a_connection_is_lost_whatever_the_kernel_calls_it(number: int) -> None:
    async def test() -> None:
        reader = asyncio.StreamReader()
        reader.set_exception(OSError(number, "the kernel's words"))
        channel: Channel[object] = Channel(reader, None, proved(), TO_AGENT)  # type: ignore[arg-type]
        with pytest.raises(ConnectionError, match="the kernel's words"):
            await channel.receive()

    run(test())


def test_kernels_ask_each_other_after_a_minute_of_silence() -> None:
    with socket.socket() as sock:
        keep_alive(sock)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_KEEPIDLE"):
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
