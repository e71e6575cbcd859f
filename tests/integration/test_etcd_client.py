"""The client of etcd, against a server that drops, delays and refuses requests; tests/engines has a real etcd."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import partial

import pytest

from farandole.integrations.etcd import etcd_client
from farandole.integrations.etcd.etcd_client import (
    EtcdAccess,
    EtcdClient,
    EtcdRefused,
    EtcdUnavailable,
    changed_in,
    created_in,
    delete,
    put,
)
from tests.support.etcd_double import EtcdDouble


@pytest.fixture
def etcd() -> Iterator[EtcdDouble]:
    with EtcdDouble() as double:
        yield double


@pytest.fixture
def client(etcd: EtcdDouble) -> Iterator[EtcdClient]:
    made = EtcdClient(etcd.access())
    yield made
    made.close()


def test_a_transaction_is_done_if_its_conditions_hold_and_else_not(client: EtcdClient) -> None:
    created = client.transact([created_in("a", 0)], [put("a", b"one"), put("b", b"\0\xff")])
    assert created
    assert client.transact([created_in("a", 0)], [put("a", b"two")]) == 0
    changed = client.transact([created_in("a", created)], [put("a", b"three")])
    found = client.get("a")
    assert found is not None
    assert (found.value, found.created, found.changed) == (b"three", created, changed)
    assert client.transact([changed_in("a", created)], [delete("a")]) == 0
    assert client.transact([changed_in("a", changed)], [delete("a", "c")])
    assert client.get("a") is client.get("b") is None


def test_a_lease_ends_with_its_keys(client: EtcdClient) -> None:
    lease = client.grant_lease(6)
    client.transact([], [put("a", b"one", lease)])
    assert client.keep_alive(lease)
    client.revoke(lease)
    assert not client.keep_alive(lease)
    assert client.get("a") is None


def test_a_connection_that_has_ended_since_its_last_use_is_opened_again(etcd: EtcdDouble, client: EtcdClient) -> None:
    client.get("a")
    etcd.loses = 1
    assert client.get("a") is None
    etcd.loses = 2  # it ends again on the new connection: that is a fault of etcd's
    with pytest.raises(EtcdUnavailable, match=rf"^127.0.0.1:{etcd.port}: Remote end closed connection"):
        client.get("a")


def test_the_next_endpoint_is_asked_when_one_does_not_answer_and_then_at_first(
    etcd: EtcdDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_client, "DEADLINE_S", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoints = (silent.getsockname(), ("127.0.0.1", 1), ("127.0.0.1", etcd.port))
        client = EtcdClient(EtcdAccess(endpoints, "jobs/a"))
        assert client.transact([], [put("a", b"one")])
        client.close()
        assert client._first == 2
        etcd.answers = [(503, b'{"error": "no leader", "code": 14, "message": "no leader"}')]
        with pytest.raises(EtcdUnavailable) as raised:
            client.get("a")
        client.close()
    assert str(raised.value).split("; ") == [
        f"127.0.0.1:{etcd.port}: no leader",
        f"127.0.0.1:{endpoints[0][1]}: timed out",
        "127.0.0.1:1: [Errno 111] Connection refused",
    ]


def test_a_token_that_has_ended_is_replaced(etcd: EtcdDouble) -> None:
    etcd.users = {"root": "right"}
    client = EtcdClient(etcd.access("root", "right"))
    assert client.get("a") is None
    etcd.forget_tokens()
    assert client.get("a") is None
    assert etcd.asked.count("auth/authenticate") == 2
    client.close()


@pytest.mark.parametrize(
    ("user", "password", "problem"),
    [("", "", "invalid auth token"), ("root", "wrong", "authentication failed, invalid user ID or password")],
)
def test_whoever_is_not_let_in_is_told_why(etcd: EtcdDouble, user: str, password: str, problem: str) -> None:
    etcd.users = {"root": "right"}
    client = EtcdClient(etcd.access(user, password))
    with pytest.raises(EtcdRefused, match=problem):
        client.get("a")
    client.close()


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (404, b"404 page not found\n", r"not answer as etcd 3.4 or newer does \(status 404: '404 page not found'\)"),
        (200, b"[1]", r"not answer as etcd 3.4 or newer does \(status 200: '\[1\]'\)"),
        (200, b"\xff" * 999, r"not answer as etcd"),
        (503, b'{"code": 14, "message": "etcdserver: leader changed"}', "etcdserver: leader changed"),  # etcd 3.6
    ],
)
def test_an_answer_that_is_none_is_shown(
    etcd: EtcdDouble, client: EtcdClient, status: int, body: bytes, problem: str
) -> None:
    etcd.answers = [(status, body)]
    with pytest.raises(EtcdUnavailable, match=problem):
        client.get("a")


def test_another_server_with_json_is_no_etcd(etcd: EtcdDouble, client: EtcdClient) -> None:
    asking = [
        partial(client.grant_lease, 6),
        partial(client.keep_alive, "7"),
        partial(client.transact, [], []),
        partial(client.get, "a"),
    ]
    for ask in asking:
        etcd.answers = [(200, b'{"hello": "world", "kvs": [{"create_revision": "1", "mod_revision": "x"}]}')]
        with pytest.raises(EtcdRefused, match="something else than etcd"):
            ask()
