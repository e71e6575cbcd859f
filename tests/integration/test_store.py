"""Torch's own TCPStore clients at our store: the same answers as from torch's server, to every operation."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from farandole.base.machine import now_s
from tests.support.store_process import StoreProcess

LONG = timedelta(seconds=60)


@pytest.fixture
def ours() -> Iterator[StoreProcess]:
    with StoreProcess() as store:
        yield store
    assert store.log == [], "no client was refused"


def connect(store: StoreProcess, timeout: timedelta = LONG) -> Any:
    return TCPStore("127.0.0.1", store.port, None, False, timeout, wait_for_workers=False)


def torch_store() -> Any:
    return TCPStore("127.0.0.1", 0, None, True, LONG, wait_for_workers=False)


def outcome(call: Callable[[], object]) -> object:
    """Return what a call returns, or how its error begins."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - it is compared
        return type(error).__name__, str(error).splitlines()[0]


SHORT = timedelta(seconds=0.2)

OPERATIONS: list[Callable[[Any], object]] = [
    lambda store: store.set("a", "1"),
    lambda store: store.get("a"),
    lambda store: store.set("a", ""),
    lambda store: store.get("a"),
    lambda store: store.set("bytes", b"\x00\xff\n"),
    lambda store: store.get("bytes"),
    lambda store: store.add("n", 5),
    lambda store: store.add("n", -7),
    lambda store: store.get("n"),
    lambda store: store.add("n", 0),
    lambda store: store.compare_set("c", "", "x"),
    lambda store: store.compare_set("c", "y", "z"),
    lambda store: store.compare_set("c", "x", "z"),
    lambda store: store.compare_set("missing", "y", "z"),
    lambda store: store.check(["missing"]),
    lambda store: store.check(["a", "c"]),
    lambda store: store.check(["a", "missing"]),
    lambda store: store.check([]),
    lambda store: store.wait(["a", "c", "a"]),
    lambda store: store.wait(["missing", "a"], SHORT),
    lambda store: store.get("a"),
    lambda store: store.append("p", "one"),
    lambda store: store.append("p", " two"),
    lambda store: store.get("p"),
    lambda store: store.multi_set(["m1", "m2"], ["1", "2"]),
    lambda store: store.multi_get(["m2", "m1", "a"]),
    lambda store: store.num_keys(),
    lambda store: store.delete_key("a"),
    lambda store: store.delete_key("a"),
    lambda store: store.check(["a"]),
    lambda store: store.num_keys(),
    lambda store: store.queue_len("q"),
    lambda store: store.queue_push("q", "first"),
    lambda store: store.queue_push("q", "second"),
    lambda store: store.queue_len("q"),
    lambda store: store.check(["q"]),
    lambda store: store.num_keys(),
    lambda store: store.queue_pop("q"),
    lambda store: store.queue_pop("q"),
    lambda store: store.queue_pop("q", block=False),
    lambda store: store.queue_len("q"),
    lambda store: store.check(["q"]),
    lambda store: sorted(store.list_keys()),
    lambda store: store.barrier("b", 1, LONG),
    lambda store: store.barrier("b2", 2, SHORT),
    lambda store: store.barrier("b2", 2, LONG),
    lambda store: store.set("long", "x" * (8 << 20)),
    lambda store: len(store.get("long")),
    lambda store: store.set("k" * 8000, "x"),
    lambda store: store.get("k" * 8000),
    lambda store: store.clone().get("p"),
]


def test_every_operation_has_the_result_that_torch_s_own_server_gives(ours: StoreProcess) -> None:
    mine, theirs = connect(ours), torch_store()
    supported = [each for each in OPERATIONS if not _is_missing(each, theirs)]
    assert len(supported) >= 30
    for number, operation in enumerate(supported):
        assert outcome(lambda: operation(mine)) == outcome(lambda: operation(theirs)), f"operation {number}"  # noqa: B023


def _is_missing(operation: Callable[[Any], object], store: Any) -> bool:
    """Whether this version of torch lacks the method."""
    return any(name not in dir(store) for name in operation.__code__.co_names if name not in ("SHORT", "LONG"))


def test_a_blocked_get_ends_when_another_client_sets_the_key(ours: StoreProcess) -> None:
    results: list[bytes] = []
    waiting = [threading.Thread(target=lambda: results.append(connect(ours).get("late"))) for _ in range(5)]
    for each in waiting:
        each.start()
    store = connect(ours)
    store.add("other", 1)
    store.set("late", "now")
    for each in waiting:
        each.join()
    assert results == [b"now"] * 5


def test_a_wait_that_is_over_in_time_leaves_the_connection_usable(ours: StoreProcess) -> None:
    store = connect(ours)
    began_s = now_s()
    with pytest.raises(dist.DistStoreError):
        store.wait(["never"], timedelta(seconds=0.3))
    assert 0.25 < now_s() - began_s < 10
    store.set("never", "after all")
    assert store.get("never") == b"after all"


def test_a_client_that_is_killed_in_a_wait_disturbs_nobody(ours: StoreProcess) -> None:
    script = (
        "import sys\nfrom torch.distributed import TCPStore\n"
        "s = TCPStore('127.0.0.1', int(sys.argv[1]), None, False, wait_for_workers=False)\n"
        "s.set('alive', '')\ns.get('never')"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(ours.port)])
    store = connect(ours)
    store.wait(["alive"], LONG)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(60)
    for _ in range(100):
        store.add("n", 1)
    store.set("never", "x")
    assert store.get("never") == b"x"


def test_many_clients_count_together(ours: StoreProcess) -> None:
    clients = [connect(ours) for _ in range(40)]
    assert [client.add("n", 1) for client in clients] == list(range(1, 41))
    threads = [
        threading.Thread(target=lambda client=client: [client.add("m", 1) for _ in range(50)]) for client in clients[:8]
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert clients[0].add("m", 0) == 400


def test_the_barrier_of_torch_elastic_works_and_names_who_is_missing(ours: StoreProcess) -> None:
    from torch.distributed.elastic.utils.store import barrier

    stores = [connect(ours) for _ in range(4)]
    threads = [threading.Thread(target=barrier, args=(store, 4, "together", 60.0)) for store in stores]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
        assert not each.is_alive()
    with pytest.raises(dist.DistStoreError):
        barrier(stores[0], 2, "alone", 0.3)


def test_a_server_that_ends_is_an_error_for_its_clients() -> None:
    with StoreProcess() as server:
        store = connect(server)
        store.set("k", "v")
    with pytest.raises(dist.DistNetworkError):
        store.get("k")
