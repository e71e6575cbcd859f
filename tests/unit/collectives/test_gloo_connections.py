"""Which sockets of a process belong to a group of Gloo's."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from farandole.training.collectives.torch_group import ExchangedStore
from tests.support.gloo_transport import (
    find_connections,
    find_listening_address,
    shut_down_connections,
)

pytestmark = pytest.mark.core


@contextlib.contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket, socket.socket]]:
    """A listening socket, one that has dialled it, and the one that was accepted."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as dialled,
        listening.accept()[0] as accepted,
    ):
        yield listening, dialled, accepted


def test_connections_from_and_to_a_port_end_and_all_others_stay() -> None:
    with connected() as (listening, dialled, accepted), connected() as (other, still_dialled, still_accepted):
        shut_down_connections(find_connections(listening.getsockname(), []))
        assert accepted.recv(1) == dialled.recv(1) == b""
        still_dialled.sendall(b"x")
        assert still_accepted.recv(1) == b"x"
        shut_down_connections(find_connections(("127.0.0.1", 1), [other.getsockname()]))
        assert still_dialled.recv(1) == b""
        with socket.create_connection(listening.getsockname()):
            listening.settimeout(5)
            listening.accept()[0].close()  # it still listens


def test_connections_that_were_opened_later_at_the_same_port_stay() -> None:
    with connected() as (listening, dialled, accepted):
        earlier = find_connections(listening.getsockname(), [listening.getsockname()])
        assert len(earlier) == 2  # both ends are here
        with socket.create_connection(listening.getsockname()) as later, listening.accept()[0] as accepted_later:
            shut_down_connections(earlier)
            assert accepted.recv(1) == dialled.recv(1) == b""
            later.sendall(b"x")
            assert accepted_later.recv(1) == b"x"


def test_a_device_of_gloos_is_found_by_what_it_tells_the_others() -> None:
    store = ExchangedStore(5)
    store.abandon()
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    with connected(), pytest.raises(TimeoutError):
        dist.ProcessGroupGloo(store, 0, 2, options)
    store.close()
    found = find_listening_address(b"".join(store.mine.values()))
    assert found is not None
    host, port = found
    assert host == "127.0.0.1"
    assert port > 0
    assert find_listening_address(b"nobody") is None
