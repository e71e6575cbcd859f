"""The store by which the ranks of a process group find each other."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator

import pytest

from farandole.training.collectives.torch_group import ExchangedStore


@pytest.fixture
def store() -> Iterator[ExchangedStore]:
    made = ExchangedStore(5)
    yield made
    made.close()


def is_readable(store: ExchangedStore, timeout_s: float = 0) -> bool:
    return bool(select.select([store.descriptor], [], [], timeout_s)[0])


def test_who_asks_waits_until_it_was_brought(store: ExchangedStore) -> None:
    got: list[bytes] = []
    store.set("0/0", b"here")
    assert store.take_unsent() == {"0/0": b"here"}
    assert not is_readable(store)
    thread = threading.Thread(target=lambda: got.append(store.get("0/1")))
    thread.start()
    assert is_readable(store, 5)
    store.bring([{}, {"1/0": b"others"}])
    assert store.has_to_send
    store.bring([{}, {"0/1": b"there"}])
    thread.join(5)
    assert got == [b"there"]
    assert not is_readable(store)
    store.wait(["0/0", "0/1"])
    assert store.check(["0/0", "1/0"])
    assert not store.check(["0/0", "0/2"])


def test_each_value_and_the_end_are_told_once(store: ExchangedStore) -> None:
    store.set("a", "text")
    store.set("b", b"bytes")
    assert is_readable(store)
    assert store.take_unsent() == {"a": b"text", "b": b"bytes"}
    assert store.take_unsent() == {}
    store.end()
    assert is_readable(store)
    assert store.take_unsent() == {}
    assert not is_readable(store)
    assert store.mine == {"a": b"text", "b": b"bytes"}


def test_who_asks_is_told_when_nothing_will_be_brought(store: ExchangedStore) -> None:
    store.abandon()
    with pytest.raises(TimeoutError, match="no other rank has set the key '0/1'"):
        store.wait(["0/1"])


def test_who_asks_does_not_wait_for_ever() -> None:
    store = ExchangedStore(0.001)
    with pytest.raises(TimeoutError):
        store.get("0/1")
    store.close()
    store.set("later", b"is no error")


def test_a_value_is_replaced_only_where_it_is_the_expected_one(store: ExchangedStore) -> None:
    assert store.compare_set("claimed", "", "mine") == b"mine"
    assert store.compare_set("claimed", b"", b"another's") == b"mine"
    assert store.compare_set("claimed", b"mine", b"next") == b"next"
    assert store.take_unsent() == {"claimed": b"next"}
