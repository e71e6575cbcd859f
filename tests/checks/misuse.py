"""Checks of what one rank can find wrong by itself: the error, and that nothing is left of it. All ranks make the
same mistake, and go on together afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

import farandole as fd
from farandole.integrations.horovod.named.engine import engine
from farandole.integrations.horovod.named.stages import Kind
from tests.checks.tensors import assert_same, mine, of_all, reduced

Begin = Callable[..., Any]

REDUCING: Sequence[tuple[Begin, bool]] = (
    (fd.allreduce, False),
    (fd.allreduce_, False),
    (fd.allreduce_async, False),
    (fd.allreduce_async_, False),
    (fd.grouped_allreduce, True),
    (fd.grouped_allreduce_, True),
    (fd.grouped_allreduce_async, True),
    (fd.grouped_allreduce_async_, True),
)
SCATTERING: Sequence[tuple[Begin, bool]] = (
    (fd.reducescatter, False),
    (fd.reducescatter_async, False),
    (fd.grouped_reducescatter, True),
    (fd.grouped_reducescatter_async, True),
)
"""Functions, and whether they take a list."""


def assert_all_is_well() -> None:
    """Ranks still count alike, and names are free."""
    assert_same(fd.allreduce(mine(), op=fd.Sum), reduced(of_all(), fd.Sum))
    assert_same(fd.allgather(mine()), torch.cat(of_all()))
    assert_same(fd.allreduce(mine(), name="wrong", op=fd.Sum), reduced(of_all(), fd.Sum))


def assert_refused(kind: type[Exception], words: str, *calls: Callable[[], object]) -> None:
    for call in calls:
        with pytest.raises(kind, match=words):
            call()
    assert_all_is_well()


def check_the_operation_said_twice() -> None:
    for reduce_by, takes_list in REDUCING:
        tensor = [mine()] if takes_list else mine()
        assert_refused(
            ValueError,
            "op and average",
            lambda: reduce_by(tensor, average=True, name="wrong", op=fd.Sum),  # noqa: B023
        )


def check_operations_that_there_are_not() -> None:
    for reduce_by, takes_list in (*REDUCING, *SCATTERING):
        tensor = [mine()] if takes_list else mine()
        for op in (-1, 6, "Sum"):
            assert_refused(
                ValueError, "op must be one of Average, Sum", partial(reduce_by, tensor, name="wrong", op=op)
            )


def check_a_mistake_takes_the_number_of_an_unnamed_operation() -> None:
    """So that ranks count alike when one of them made a mistake and the others did not."""
    for call_by, takes_list in (*REDUCING, *SCATTERING):
        tensor = [mine()] if takes_list else mine()
        kind = Kind.REDUCESCATTER if (call_by, takes_list) in SCATTERING else Kind.ALLREDUCE
        before = engine().next_number(kind, 0)
        with pytest.raises(ValueError, match="op must be"):
            call_by(tensor, op=6)
        assert (call_by.__name__, engine().next_number(kind, 0)) == (call_by.__name__, before + 2)
    before = engine().next_number(Kind.ALLGATHER, 0)
    with pytest.raises(ValueError, match="a list of tensors, got generator"):
        fd.grouped_allgather(mine() for _ in range(2))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="_indices"):
        fd.sparse_allreduce_async(mine(), None, fd.Sum)
    assert engine().next_number(Kind.ALLGATHER, 0) == before + 4  # a sparse tensor takes two
    assert_all_is_well()


def check_a_reducescatter_sums_or_averages() -> None:
    for scatter, takes_list in SCATTERING:
        tensor = [mine()] if takes_list else mine()
        for op in (fd.Min, fd.Max, fd.Product, fd.Adasum):
            assert_refused(fd.HorovodInternalError, "op=Sum or op=Average", partial(scatter, tensor, op=op))


def check_dtypes_that_cannot_be_reduced() -> None:
    for reduce_by, takes_list in (*REDUCING, *SCATTERING):
        for dtype in (torch.uint8, torch.int8, torch.int16, torch.complex64, torch.float8_e5m2):
            tensor = torch.ones(fd.size()).to(dtype)
            words = str(dtype)
            wrong = [mine((fd.size(),)), tensor] if takes_list else tensor
            assert_refused(ValueError, words, partial(reduce_by, wrong, name="wrong", op=fd.Sum))


def check_bools_have_no_average_and_no_scale() -> None:
    bools = torch.ones(fd.size(), dtype=torch.bool)
    assert_refused(
        ValueError,
        "bools",
        lambda: fd.allreduce(bools),
        lambda: fd.reducescatter(bools),
        lambda: fd.allreduce(bools, op=fd.Sum, prescale_factor=2.0),
        lambda: fd.grouped_allreduce([bools], op=fd.Max, postscale_factor=0.5),
    )


def check_what_is_no_dense_tensor() -> None:
    sparse = torch.eye(fd.size()).to_sparse()
    for wrong in (sparse, [1.0, 2.0], 3, None, "tensor"):
        words = "sparse_allreduce_async" if wrong is sparse else "expected a tensor"
        assert_refused(
            ValueError,
            words,
            partial(fd.allreduce, wrong),
            partial(fd.allreduce_, wrong),
            partial(fd.grouped_allreduce, [mine(), wrong]),
            partial(fd.allgather, wrong),
            partial(fd.grouped_allgather, [wrong]),
            partial(fd.broadcast, wrong, 0),
            partial(fd.broadcast_, wrong, 0),
            partial(fd.alltoall, wrong),
            partial(fd.reducescatter, wrong),
        )


def check_tensors_without_memory() -> None:
    """On torch's device "meta" there is nothing to send."""
    ghost = torch.empty(fd.size(), device="meta")
    assert_refused(
        ValueError,
        "meta",
        lambda: fd.allreduce(ghost),
        lambda: fd.allreduce_(ghost),
        lambda: fd.grouped_allreduce([ghost, ghost]),
        lambda: fd.allgather(ghost),
        lambda: fd.broadcast(ghost, 0),
        lambda: fd.alltoall(ghost),
        lambda: fd.reducescatter(ghost),
    )


def check_tensors_whose_memory_was_taken_away() -> None:
    """As sharding libraries do with parameters not in use. And tensors of torch.func have none of their own."""
    empty = torch.ones(fd.size())
    part = empty[1:]
    empty.untyped_storage().resize_(0)
    assert_refused(
        ValueError,
        "has no memory to read",
        lambda: fd.allreduce(empty),
        lambda: fd.allreduce_(empty, name="wrong"),
        lambda: fd.grouped_allreduce([mine(), empty]),
        lambda: fd.allgather(part),
        lambda: fd.broadcast(empty, 0),
        lambda: fd.alltoall(empty),
        lambda: fd.reducescatter(empty),
        lambda: torch.func.vmap(lambda row: fd.allreduce(row))(torch.ones(2, fd.size())),
    )


def check_a_tensor_that_overlaps_itself_cannot_be_overwritten() -> None:
    assert_refused(
        RuntimeError,
        "single memory location",
        lambda: fd.allreduce_(torch.ones(1).expand(4), name="wrong"),
        lambda: fd.grouped_allreduce_([torch.ones(1).expand(4), mine()], name="wrong"),
        lambda: fd.broadcast_(torch.ones(1).expand(4), 0, "wrong"),
    )


def check_scalars_have_no_rows_to_deal_out() -> None:
    scalar = torch.tensor(1.0)
    assert_refused(
        ValueError,
        "dimension",
        lambda: fd.reducescatter(scalar),
        lambda: fd.reducescatter_async(scalar),
        lambda: fd.grouped_reducescatter([mine(), scalar]),
        lambda: fd.alltoall(scalar),
        lambda: fd.alltoall_async(scalar, [1] * fd.size()),
    )


def check_roots_that_there_are_not() -> None:
    for root in (-1, fd.size(), 10**6):
        assert_refused(
            ValueError,
            "root_rank",
            partial(fd.broadcast, mine(), root),
            partial(fd.broadcast_, mine(), root, "wrong"),
            partial(fd.broadcast_async, mine(), root),
            partial(fd.broadcast_async_, mine(), root),
            partial(fd.broadcast_object, "x", root),
            partial(fd.broadcast_parameters, [mine()], root),
        )


def check_a_root_outside_the_process_set() -> None:
    members = fd.add_process_set([0])
    if fd.rank() == 0:
        for call in (fd.broadcast, fd.broadcast_, fd.broadcast_async, fd.broadcast_async_):
            with pytest.raises(ValueError, match="root_rank"):
                call(mine(), 1, None, members)
    assert fd.remove_process_set(members)
    assert_all_is_well()


def check_splits_that_do_not_fit() -> None:
    size = fd.size()
    tensor = mine((2 * size,))
    ones = [1] * size
    for splits in (
        [1] * (size + 1),
        [1] * (size - 1),
        [3] * size,
        [-1, *ones[1:]],
        [ones],
        [],
        torch.ones(size),
        torch.ones(size, 1, dtype=torch.int32),
        torch.ones(size, dtype=torch.bool),
        torch.tensor(1),
    ):
        assert_refused(
            ValueError,
            "splits",
            partial(fd.alltoall, tensor, splits, "wrong"),
            partial(fd.alltoall_async, tensor, splits),
        )
    assert_refused(ValueError, "splits", lambda: fd.alltoall(mine((2 * size + 1,))))


def check_process_sets_that_were_not_added() -> None:
    one = fd.ProcessSet(range(fd.size()))
    assert_refused(
        ValueError,
        "not one of the process sets",
        lambda: fd.allreduce(mine(), name="wrong", process_set=one),
        lambda: fd.grouped_allreduce([mine()], process_set=one),
        lambda: fd.allgather(mine(), process_set=one),
        lambda: fd.broadcast(mine(), 0, process_set=one),
        lambda: fd.alltoall(mine((fd.size(),)), process_set=one),
        lambda: fd.reducescatter(mine(), process_set=one),
        lambda: fd.sparse_allreduce_async(torch.eye(2).to_sparse(), "wrong", fd.Sum, one),
        lambda: fd.barrier(one),
    )
    assert fd.remove_process_set(one) is False


def check_devices_may_not_be_mixed_in_a_group() -> None:
    if not torch.cuda.is_available():
        return
    both = [torch.ones(3), torch.ones(3, device="cuda")]
    assert_refused(
        fd.HorovodInternalError,
        "one device",
        lambda: fd.grouped_allreduce(both),
        lambda: fd.grouped_allreduce_(both),
        lambda: fd.grouped_allgather(both),
        lambda: fd.grouped_reducescatter(both),
    )


def check_adasum_of_integers_or_among_some() -> None:
    if fd.size() & (fd.size() - 1):
        assert_refused(NotImplementedError, "needs 1, 2, 4, 8", lambda: fd.allreduce(mine(), op=fd.Adasum))
        return
    whole = mine(dtype=torch.int64)
    assert_refused(ValueError, "floating point", lambda: fd.allreduce(whole, op=fd.Adasum))
    members = fd.add_process_set([0])
    if fd.rank() == 0:
        with pytest.raises(NotImplementedError, match="all ranks"):
            fd.allreduce(mine(), op=fd.Adasum, process_set=members)
    assert fd.remove_process_set(members)


def check_a_mistake_in_a_group_submits_none_of_it() -> None:
    assert_refused(
        ValueError,
        "cannot be reduced",
        lambda: fd.grouped_allreduce([mine(), torch.ones(2, dtype=torch.int8)], name="group"),
    )
    (result,) = fd.grouped_allreduce([mine()], name="group", op=fd.Sum)
    assert_same(result, reduced(of_all(), fd.Sum))


def check_objects_that_cannot_be_pickled() -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match="lock"):
        fd.allgather_object(lock)
    assert_all_is_well()


def check_a_timeline_that_cannot_be_written() -> None:
    if fd.rank() == 0:
        with pytest.raises(OSError, match="timeline"):
            fd.start_timeline("/no/such/folder/timeline.json")
    assert_all_is_well()


def check_one_rank_alone_makes_a_mistake() -> None:
    """It gets its error, the others wait; and all go on when it does it right."""
    if fd.rank() == 0:
        with pytest.raises(ValueError, match="dimension"):
            fd.reducescatter(torch.tensor(1.0), "late")
        with pytest.raises(ValueError, match="root_rank"):
            fd.broadcast(mine(), fd.size(), "late")
    fd.reducescatter(mine(), "late")
    fd.broadcast(mine(), 0, "late")
    assert_all_is_well()
