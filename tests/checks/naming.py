"""Checks of how operations of several ranks find each other: names, threads, handles, barriers."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import farandole as fd
from tests.checks.tensors import assert_same, mine, of_all, reduced


def kinds(name: str, seed: int) -> list[tuple[Callable[[], Any], torch.Tensor]]:
    """One operation of each kind under a name of its own, and the first tensor that comes of it."""
    size, rank = fd.size(), fd.rank()
    shape = (size, 2)
    total, parts = reduced(of_all(shape, seed=seed), fd.Sum), of_all(shape, seed=seed)
    return [
        (lambda: fd.allreduce_async(mine(shape, seed=seed), None, f"{name}.reduce", fd.Sum), total),
        (lambda: fd.allgather_async(mine(shape, seed=seed), f"{name}.gather"), torch.cat(parts)),
        (lambda: fd.broadcast_async(mine(shape, seed=seed), 1, f"{name}.cast"), parts[1]),
        (
            lambda: fd.alltoall_async(mine(shape, seed=seed), None, f"{name}.swap"),
            torch.stack([p[rank] for p in parts]),
        ),
        (lambda: fd.reducescatter_async(mine(shape, seed=seed), f"{name}.scatter", fd.Sum), total[rank : rank + 1]),
        (lambda: fd.grouped_allreduce_async([mine(shape, seed=seed)], None, f"{name}.group", fd.Sum), total),
        (lambda: fd.grouped_allgather_async([mine(shape, seed=seed)], f"{name}.rows"), torch.cat(parts)),
        (
            lambda: fd.grouped_reducescatter_async([mine(shape, seed=seed)], f"{name}.both", fd.Sum),
            total[rank : rank + 1],
        ),
    ]


def first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result  # of a group, or an alltoall


def check_every_kind_in_another_order_on_each_rank() -> None:
    for again in range(4):
        operations = [each for k in range(3) for each in kinds(f"order.{k}", k)]
        order = list(range(len(operations)))
        random.Random(again * 10 + fd.rank()).shuffle(order)
        handles = {place: operations[place][0]() for place in order}
        random.Random(again * 10 + fd.rank() + 5).shuffle(order)
        for place in order:
            assert_same(first(fd.synchronize(handles[place])), operations[place][1])


def check_several_threads_at_once() -> None:
    """Each with names of its own, and in an order of its own on each rank."""
    failures: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for again in range(5):
                operations = kinds(f"thread.{thread}.{again}", thread + again)
                random.Random(100 * thread + again + fd.rank()).shuffle(operations)
                handles = [begin() for begin, _ in operations]
                for handle, (_, wanted) in zip(handles, operations, strict=True):
                    assert_same(first(fd.synchronize(handle)), wanted)
                fd.allreduce_(mine(), name=f"thread.{thread}.waits")
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def check_unnamed_operations_are_counted_for_each_kind() -> None:
    """Ranks may do different kinds in different orders; what has no name is told apart by its number."""
    size, rank = fd.size(), fd.rank()
    begins: list[Callable[[], Any]] = [
        lambda: fd.allreduce_async(mine(seed=1), op=fd.Sum),
        lambda: fd.allgather_async(mine(seed=2)),
        lambda: fd.broadcast_async(mine(seed=3), 0),
        lambda: fd.alltoall_async(mine((size, 1), seed=4)),
    ]
    for _ in range(3):
        turned = [(rank + k) % len(begins) for k in range(len(begins))]
        handles = {place: begins[place]() for place in turned}
        assert_same(fd.synchronize(handles[0]), reduced(of_all(seed=1), fd.Sum))
        assert_same(fd.synchronize(handles[1]), torch.cat(of_all(seed=2)))
        assert_same(fd.synchronize(handles[2]), of_all(seed=3)[0])
        assert_same(fd.synchronize(handles[3])[0], torch.stack([part[rank] for part in of_all((size, 1), seed=4)]))


def check_one_name_may_be_used_by_several_operations_in_turn() -> None:
    name = "one name"
    for again in range(3):
        assert_same(fd.allreduce(mine(seed=again), name=name, op=fd.Sum), reduced(of_all(seed=again), fd.Sum))
        assert_same(fd.allgather(mine(seed=again), name), torch.cat(of_all(seed=again)))
        assert_same(fd.broadcast(mine(seed=again), 0, name), of_all(seed=again)[0])
        (grouped,) = fd.grouped_allreduce([mine(seed=again)], name=name, op=fd.Sum)
        assert_same(grouped, reduced(of_all(seed=again), fd.Sum))


def check_names_may_be_anything() -> None:
    for name in ("", "a" * 5000, "größer/als.1 \n\t\0☃"):
        assert_same(fd.allreduce(mine(), name=name, op=fd.Sum), reduced(of_all(), fd.Sum))


def check_poll_asks_and_synchronize_takes_once() -> None:
    held = fd.rank() == 0
    handle = None if held else fd.allreduce_async(mine(), name="polled", op=fd.Sum)
    if handle is not None:
        assert fd.poll(handle) is False, "rank 0 has not come"
    fd.barrier()
    handle = fd.allreduce_async(mine(), name="polled", op=fd.Sum) if handle is None else handle
    while not fd.poll(handle):  # ends: all ranks have submitted it
        time.sleep(0)
    assert_same(fd.synchronize(handle), reduced(of_all(), fd.Sum))
    assert fd.synchronize(handle) is None
    with pytest.raises(ValueError, match="synchronize"):
        fd.poll(handle)


def check_what_is_no_handle() -> None:
    for nothing in (None, 10**9, "handle"):
        assert fd.synchronize(nothing) is None
        with pytest.raises(ValueError, match="poll"):
            fd.poll(nothing)


def check_a_name_in_flight_is_refused_and_free_again_afterwards() -> None:
    begins: list[Callable[[], Any]] = [
        lambda: fd.allreduce_async(mine(), name="busy", op=fd.Sum),
        lambda: fd.allgather_async(mine(), "busy"),
        lambda: fd.broadcast_async(mine(), 0, "busy"),
        lambda: fd.alltoall_async(mine((fd.size(),)), None, "busy"),
        lambda: fd.reducescatter_async(mine(), "busy"),
        lambda: fd.grouped_allreduce_async([mine(), mine()], name="busy"),
    ]
    for begin in begins:
        handle = None
        if fd.rank() != 0:  # rank 0 does not come before the barrier, so it is in flight for sure
            handle = begin()
            with pytest.raises(ValueError, match="busy"):
                begin()
        fd.barrier()
        fd.synchronize(begin() if handle is None else handle)
        fd.synchronize(begin())


def check_a_handle_that_nobody_synchronizes() -> None:
    """Its name is free as soon as it has ended."""
    for _ in range(3):
        handle = fd.allreduce_async(mine(), name="dropped", op=fd.Sum)
        while not fd.poll(handle):
            time.sleep(0)
        del handle
    assert_same(fd.allreduce(mine(), name="dropped", op=fd.Sum), reduced(of_all(), fd.Sum))


def check_barrier_waits_for_all() -> None:
    for late in range(fd.size()):
        if fd.rank() == late:
            fd.broadcast(torch.zeros(100_000), late, "something first")
        else:
            handle = fd.broadcast_async(torch.zeros(100_000), late, "something first")
        came = time.monotonic()
        fd.barrier()
        left = time.monotonic()
        if fd.rank() != late:
            fd.synchronize(handle)
        times = fd.allgather_object((came, left))
        assert max(came for came, _ in times) <= min(left for _, left in times), "the clock is one for all processes"


def check_barrier_passes_while_operations_are_outstanding() -> None:
    begins = [begin for begin, _ in kinds("outstanding", 0)]
    wanted = [each for _, each in kinds("outstanding", 0)]
    ours = begins[::2] if fd.rank() == 0 else begins[1::2]
    others = begins[1::2] if fd.rank() == 0 else begins[::2]
    handles = {begin: begin() for begin in ours}
    fd.barrier()
    fd.barrier(fd.global_process_set)
    assert not any(fd.poll(handle) for handle in handles.values())
    fd.allgather_object("all have looked")
    handles |= {begin: begin() for begin in others}
    for begin, value in zip(begins, wanted, strict=True):
        assert_same(first(fd.synchronize(handles[begin])), value)


def check_an_operation_on_the_way_does_not_hold_up_others() -> None:
    """Rank 0 comes to "early" last, everybody to "late" before."""
    handle = None if fd.rank() == 0 else fd.allreduce_async(mine(), name="early", op=fd.Sum)
    for again in range(5):
        assert_same(fd.allreduce(mine(), name=f"late.{again}", op=fd.Sum), reduced(of_all(), fd.Sum))
    assert handle is None or not fd.poll(handle)
    fd.barrier()
    handle = handle or fd.allreduce_async(mine(), name="early", op=fd.Sum)
    assert_same(fd.synchronize(handle), reduced(of_all(), fd.Sum))
