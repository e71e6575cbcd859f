"""The store by which the ranks of a Gloo group find each other."""

from __future__ import annotations

import threading

import pytest

from farandole.collectives.gloo.store import ExchangedStore


def test_who_asks_waits_until_everything_was_brought() -> None:
    store, got = ExchangedStore(5), []
    store.set("0/0", b"here")
    thread = threading.Thread(target=lambda: got.append(store.get("0/1")))
    thread.start()
    assert store.has_spoken.wait(5)
    assert store.mine == {"0/0": b"here"}
    store.bring([store.mine, {"0/1": b"there"}])
    thread.join(5)
    assert got == [b"there"]
    store.wait(["0/0", "0/1"])
    with pytest.raises(LookupError, match="0/2"):
        store.get("0/2")


def test_who_asks_is_told_when_nothing_will_be_brought() -> None:
    store = ExchangedStore(5)
    store.abandon()
    with pytest.raises(TimeoutError, match="did not tell"):
        store.wait(["0/1"])


def test_who_asks_does_not_wait_for_ever() -> None:
    with pytest.raises(TimeoutError):
        ExchangedStore(0.001).get("0/1")
