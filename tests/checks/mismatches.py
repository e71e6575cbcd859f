"""Checks of what only all ranks together can find wrong: every rank gets the error, in time, and the job goes on.

Most are lines of a table: what one rank does, and what the others do under the same name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

import farandole as fd
from tests.checks.running import Checks
from tests.checks.tensors import assert_same, mine, of_all, reduced

LIMIT_S = 10.0

Begin = Callable[[], object]

float32, float64, int64 = torch.float32, torch.float64, torch.int64


def rows(*shape: int, dtype: torch.dtype = float32) -> torch.Tensor:
    """A tensor with enough rows for each rank."""
    return torch.ones(2 * fd.size(), *shape, dtype=dtype)


# Name in the reports: (what rank 0 does, what the others do, words of the message).
DISAGREEMENTS: dict[str, tuple[Callable[[str], object], Callable[[str], object], str]] = {
    "dtypes of an allreduce": (
        lambda name: fd.allreduce(rows(), name=name),
        lambda name: fd.allreduce(rows(dtype=float64), name=name),
        "dtype",
    ),
    "dtypes of an allreduce in place": (
        lambda name: fd.allreduce_(rows(dtype=int64), name=name),
        lambda name: fd.allreduce_(rows(), name=name),
        "dtype",
    ),
    "dtypes of an allgather": (
        lambda name: fd.allgather(rows(), name),
        lambda name: fd.allgather(rows(dtype=int64), name),
        "dtype",
    ),
    "dtypes of a broadcast": (
        lambda name: fd.broadcast(rows(), 0, name),
        lambda name: fd.broadcast(rows(dtype=float64), 0, name),
        "dtype",
    ),
    "dtypes of an alltoall": (
        lambda name: fd.alltoall(rows(), None, name),
        lambda name: fd.alltoall(rows(dtype=int64), None, name),
        "dtype",
    ),
    "dtypes of a reducescatter": (
        lambda name: fd.reducescatter(rows(), name),
        lambda name: fd.reducescatter(rows(dtype=float64), name),
        "dtype",
    ),
    "dtypes after compression": (
        lambda name: fd.allreduce(rows(), name=name, compression=fd.Compression.fp16),
        lambda name: fd.allreduce(rows(), name=name),
        "dtype",
    ),
    "shapes of an allreduce": (
        lambda name: fd.allreduce(rows(3), name=name),
        lambda name: fd.allreduce(rows(2), name=name),
        "shape",
    ),
    "dimensions of an allreduce": (
        lambda name: fd.allreduce(torch.ones(6), name=name),
        lambda name: fd.allreduce(torch.ones(2, 3), name=name),
        "shape",
    ),
    "a tensor of nothing": (
        lambda name: fd.allreduce(torch.ones(0), name=name),
        lambda name: fd.allreduce(torch.ones(1), name=name),
        "shape",
    ),
    "rows of an allgather": (
        lambda name: fd.allgather(rows(3), name),
        lambda name: fd.allgather(rows(2), name),
        "shape of one row",
    ),
    "dimensions of an allgather": (
        lambda name: fd.allgather(rows(3), name),
        lambda name: fd.allgather(rows(3, 1), name),
        "shape of one row",
    ),
    "shapes of a broadcast": (
        lambda name: fd.broadcast(rows(3), 0, name),
        lambda name: fd.broadcast(rows(2), 0, name),
        "shape",
    ),
    "rows of an alltoall": (
        lambda name: fd.alltoall(rows(3), None, name),
        lambda name: fd.alltoall(rows(2), [1] * fd.size(), name),
        "shape of one row",
    ),
    "shapes of a reducescatter": (
        lambda name: fd.reducescatter(rows(3), name),
        lambda name: fd.reducescatter(rows(3)[1:], name),
        "shape",
    ),
    "operations of an allreduce": (
        lambda name: fd.allreduce(rows(), name=name, op=fd.Sum),
        lambda name: fd.allreduce(rows(), name=name),
        "Sum",
    ),
    "minimum and maximum": (
        lambda name: fd.allreduce(rows(), name=name, op=fd.Min),
        lambda name: fd.allreduce(rows(), name=name, op=fd.Max),
        "reduction",
    ),
    "operations of a reducescatter": (
        lambda name: fd.reducescatter(rows(), name, op=fd.Sum),
        lambda name: fd.reducescatter(rows(), name),
        "reduction",
    ),
    "prescale factors": (
        lambda name: fd.allreduce(rows(), name=name, prescale_factor=0.5),
        lambda name: fd.allreduce(rows(), name=name),
        "prescale",
    ),
    "postscale factors": (
        lambda name: fd.allreduce(rows(), name=name, postscale_factor=0.5),
        lambda name: fd.allreduce(rows(), name=name, postscale_factor=0.25),
        "postscale",
    ),
    "scales of a reducescatter": (
        lambda name: fd.reducescatter(rows(), name, prescale_factor=2.0),
        lambda name: fd.reducescatter(rows(), name),
        "prescale",
    ),
    "roots": (
        lambda name: fd.broadcast(rows(), 0, name),
        lambda name: fd.broadcast(rows(), 1, name),
        "root",
    ),
    "roots in place": (
        lambda name: fd.broadcast_(rows(), 1, name),
        lambda name: fd.broadcast_(rows(), 0, name),
        "root",
    ),
    "roots of parameters": (
        lambda name: fd.broadcast_parameters({name: rows()}, 0),
        lambda name: fd.broadcast_parameters({name: rows()}, 1),
        "root",
    ),
    "allreduce and allgather": (
        lambda name: fd.allreduce(rows(), name=name),
        lambda name: fd.allgather(rows(), name),
        "allgather",
    ),
    "broadcast and allreduce": (
        lambda name: fd.broadcast(rows(), 0, name),
        lambda name: fd.allreduce_(rows(), name=name),
        "broadcast",
    ),
    "alltoall and reducescatter": (
        lambda name: fd.alltoall(rows(), None, name),
        lambda name: fd.reducescatter(rows(), name),
        "alltoall",
    ),
    "an object and parameters": (
        lambda name: fd.broadcast_object("x", 0, name),
        lambda name: fd.broadcast_parameters({f"{name}.length": torch.ones(3)}, 0),
        "dtype|shape",
    ),
    "grouped and single": (
        lambda name: fd.grouped_allreduce([rows(), rows()], name=name),
        lambda name: fd.allreduce(rows(), name=name),
        "group",
    ),
    "a group of one and a single": (
        lambda name: fd.allgather(rows(), name),
        lambda name: fd.grouped_allgather([rows()], name),
        "group",
    ),
    "sizes of a group": (
        lambda name: fd.grouped_allreduce([rows()] * 3, name=name),
        lambda name: fd.grouped_allreduce([rows()] * 2, name=name),
        "group",
    ),
    "shapes in a group": (
        lambda name: fd.grouped_allreduce([rows(), rows(1), rows()], name=name),
        lambda name: fd.grouped_allreduce([rows(), rows(2), rows()], name=name),
        "shape",
    ),
    "kinds of groups": (
        lambda name: fd.grouped_allreduce([rows()] * 2, name=name),
        lambda name: fd.grouped_reducescatter([rows()] * 2, name),
        "group",
    ),
    "entries of a sparse tensor": (
        lambda name: fd.sparse_allreduce_async(torch.eye(3).to_sparse(), name, fd.Sum)(),
        lambda name: fd.sparse_allreduce_async(torch.eye(3).double().to_sparse(), name, fd.Sum)(),
        "dtype",
    ),
}


def check_disagreement(first: Callable[[str], object], other: Callable[[str], object], words: str, name: str) -> None:
    """Whoever is the odd one out, at once and from the cache: all get the error, then all agree."""
    for odd in range(fd.size()):
        assert_fails(partial(first if fd.rank() == odd else other, name), words)
        assert_goes_on(name)
    first(name)  # the same on all ranks: nothing was wrong with it as such
    other(name)
    assert_fails(partial(first if fd.rank() == 0 else other, name), words)  # what was agreed before, on some ranks
    assert_goes_on(name)


def assert_fails(call: Begin, words: str) -> None:
    start = time.monotonic()
    with pytest.raises(fd.HorovodInternalError, match=words):
        call()
    seconds = time.monotonic() - start
    assert seconds < LIMIT_S, f"the error came after {seconds:.1f} s"


def assert_goes_on(name: str) -> None:
    assert_same(fd.allreduce(mine(), op=fd.Sum), reduced(of_all(), fd.Sum))
    assert_same(fd.allreduce(mine(), name=f"{name} afterwards", op=fd.Sum), reduced(of_all(), fd.Sum))


def check_an_asynchronous_operation_raises_when_it_is_synchronized() -> None:
    tensor = mine((2 if fd.rank() else 3,))
    begin: list[Callable[[], Any]] = [
        lambda: fd.allreduce_async(tensor, name="later"),
        lambda: fd.allreduce_async_(tensor, name="later"),
        lambda: fd.grouped_allreduce_async([tensor, mine()], name="later"),
        lambda: fd.broadcast_async_(tensor, 0, "later"),
        lambda: fd.reducescatter_async(tensor, "later"),
    ]
    for call in begin:
        handle, other = call(), fd.allreduce_async(mine(), name="beside it", op=fd.Sum)
        while not fd.poll(handle):
            time.sleep(0)
        assert_fails(lambda: fd.synchronize(handle), "shape")  # noqa: B023
        assert_same(fd.synchronize(other), reduced(of_all(), fd.Sum))
        assert fd.synchronize(handle) is None
        fd.allreduce(mine(), name="later")


def check_what_is_in_place_is_left_alone_by_a_disagreement() -> None:
    tensor = mine((2 if fd.rank() else 3,))
    kept = tensor.clone()
    for call in (lambda: fd.allreduce_(tensor, name="kept"), lambda: fd.broadcast_(tensor, 0, "kept")):
        assert_fails(call, "shape")
        assert_same(tensor, kept)


def check_many_operations_of_which_one_is_wrong() -> None:
    handles = [
        fd.allreduce_async(mine((3 + (k == 7 and fd.rank() == 0),)), name=f"of many.{k}", op=fd.Sum) for k in range(20)
    ]
    for k, handle in enumerate(handles):
        if k == 7:
            assert_fails(lambda: fd.synchronize(handle), r"of many\.7")  # noqa: B023
        else:
            assert_same(fd.synchronize(handle), reduced(of_all((3,)), fd.Sum))


def check_every_rank_says_something_else() -> None:
    assert_fails(lambda: fd.allreduce(torch.ones(fd.rank() + 1), name="each its own"), "rank 0 has")
    kinds: list[Begin] = [
        lambda: fd.allreduce(rows(), name="kinds"),
        lambda: fd.allgather(rows(), "kinds"),
        lambda: fd.broadcast(rows(), 0, "kinds"),
        lambda: fd.reducescatter(rows(), "kinds"),
    ]
    assert_fails(kinds[fd.rank() % len(kinds)], "kinds")
    assert_goes_on("kinds")


def check_a_mistake_in_a_process_set_concerns_its_members_only() -> None:
    ranks = [0, fd.size() - 1]
    members = fd.add_process_set(ranks) if fd.size() > 2 else fd.global_process_set
    if fd.rank() in ranks:
        shape = (2,) if fd.rank() else (3,)
        assert_fails(lambda: fd.allreduce(mine(shape), name="among some", process_set=members), "shape")
        assert_same(
            fd.allreduce(mine(), name="among some", op=fd.Sum, process_set=members),
            reduced(of_all(ranks=ranks), fd.Sum),
        )
    assert_goes_on("among some")
    if fd.size() > 2:
        assert fd.remove_process_set(members)


# What only time can tell ----------------------------------------------------------------------------------


@contextmanager
def giving_up_after_a_second() -> Iterator[None]:
    """Ranks that are late may still come. That they do not come any more only time can tell, for those who ask."""
    asked = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "0.5", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "1"}
    fd.shutdown()
    os.environ |= asked  # is read again by each init()
    fd.init(process_sets="dynamic")
    yield
    for name in asked:
        del os.environ[name]
    meet()
    fd.shutdown()
    fd.init(process_sets="dynamic")


def meet() -> None:
    """All ranks, also those that come so late that this is given up too: then they try again."""
    while True:
        try:
            fd.allreduce_(torch.zeros(1), name="meet")
        except fd.HorovodInternalError:
            continue
        return


def check_what_nobody_else_comes_for_is_given_up_and_says_who_is_missing() -> None:
    """Three mistakes at once, since each takes its time: a rank that never comes, another process set on rank 0, and
    unnamed operations of two kinds, which are counted apart."""
    last = fd.size() - 1
    with giving_up_after_a_second():
        members = fd.add_process_set([0, last]) if fd.size() > 2 else fd.add_process_set([0])
        waits: list[tuple[Any, str]] = []
        if fd.rank() != last:
            missing = f"rank {last} did not"
            waits += [
                (fd.allreduce_async(mine(), name="single"), missing),
                (fd.grouped_allreduce_async([mine(), mine()], name="grouped"), missing),
                (fd.allgather_async(mine(), "gathered"), missing),
                (fd.broadcast_async_(mine(), 0, "broadcast"), missing),
            ]
        if fd.rank() != 0:
            waits.append((fd.allreduce_async(mine(), name="where"), "rank 0 did not"))
            waits.append((fd.allgather_async(mine()), "rank 0 did not"))
        else:
            waits.append((fd.allreduce_async(mine()), "did not"))
            among = fd.allreduce_async(mine(), name="where", process_set=members)
            if fd.size() > 2:
                waits.append((among, f"rank {last} did not"))
            else:
                assert_same(fd.synchronize(among), mine())  # alone in it
        for handle, words in waits:
            assert_fails(partial(fd.synchronize, handle), words)
        meet()
        assert fd.remove_process_set(members)
        for name in ("single", "grouped", "gathered", "broadcast", "where"):
            assert_same(fd.allreduce(mine(), name=name, op=fd.Sum), reduced(of_all(), fd.Sum))
    assert_goes_on("afterwards")  # Unnamed operations are counted anew after init().


def disagreements() -> Checks:
    """A check for each line of the table."""
    return {
        f"mismatches.{name}": partial(check_disagreement, first, other, words, name)
        for name, (first, other, words) in DISAGREEMENTS.items()
    }
