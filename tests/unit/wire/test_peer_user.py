"""Whose process is at the other end of a connection within this machine."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator

import pytest

from farandole.base.wire import peer_user
from farandole.base.wire.peer_user import is_of_another_user

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")

ADDRESSES = [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)]


@contextlib.contextmanager
def as_another_user() -> Iterator[None]:
    own = os.geteuid()
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(own)


@contextlib.contextmanager
def connected(host: str, family: int, *, as_nobody: bool = False) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The client's end, and the server's."""
    with socket.create_server((host, 0), family=family) as server:
        with as_another_user() if as_nobody else contextlib.nullcontext():
            client = socket.create_connection(server.getsockname()[:2])
        accepted, _ = server.accept()
        with client, accepted:
            yield client, accepted


@pytest.mark.parametrize(("host", "family"), ADDRESSES)
def test_a_process_of_this_user_is_known(host: str, family: int) -> None:
    with connected(host, family) as (client, accepted):
        assert not is_of_another_user(accepted)
        assert not is_of_another_user(client)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(("host", "family"), ADDRESSES)
def test_a_process_of_another_user_is_known_also_when_it_has_gone(host: str, family: int) -> None:
    if not peer_user._is_supported():
        pytest.skip("the kernel does not tell")
    with connected(host, family, as_nobody=True) as (client, accepted):
        assert is_of_another_user(accepted)
        client.sendall(b"a request")
        client.close()
        assert is_of_another_user(accepted)


def test_a_connection_that_has_gone_is_not_taken_for_this_users() -> None:
    """Its requests may still wait to be read."""
    if not peer_user._is_supported():
        pytest.skip("the kernel does not tell")
    with connected("127.0.0.1", socket.AF_INET) as (client, accepted):
        client.close()
        assert is_of_another_user(accepted)


def test_where_the_kernel_does_not_tell_everybody_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_user, "_is_supported", lambda: False)
    with connected("127.0.0.1", socket.AF_INET) as (_, accepted):
        assert not is_of_another_user(accepted)
