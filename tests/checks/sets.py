"""Checks of process sets that are added and removed while the job runs. Those that init() is given: lifetimes.py."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

import farandole as fd
from farandole.integrations.horovod.named.process_sets import process_set_ids_and_ranks
from tests.checks.tensors import assert_same, mine, of_all, of_rank, reduced


@contextmanager
def added(*all_ranks: Sequence[int]) -> Iterator[list[fd.ProcessSet]]:
    """For a while there are these process sets."""
    members = [fd.add_process_set(ranks) for ranks in all_ranks]
    yield members
    for each in members:
        assert fd.remove_process_set(each) is True
        assert fd.remove_process_set(each) is False


def halves() -> list[list[int]]:
    """Even ranks and odd ranks."""
    return [list(range(first, fd.size(), 2)) for first in (0, 1)]


def check_process_sets_that_are_removed_leave_no_connection_and_no_memory_behind() -> None:
    def held_after_ten() -> int:
        for _ in range(10):
            with added(list(range(max(fd.size() - 1, 1)))) as (some,):
                if some.included():
                    fd.allreduce(mine(), process_set=some)
        fd.barrier()
        return len(os.listdir("/proc/self/fd"))

    gc.disable()  # it must not take a collection
    try:
        assert held_after_ten() == held_after_ten()
    finally:
        gc.enable()


def check_what_a_process_set_knows_of_itself() -> None:
    ranks = [fd.size() - 1, 0] if fd.size() > 2 else [1]
    one = fd.ProcessSet(ranks)
    assert (one.process_set_id, one.size(), one.rank()) == (None, None, None)
    assert one.ranks == sorted(ranks)
    assert fd.add_process_set(one) is one
    assert isinstance(one.process_set_id, int)
    assert one.process_set_id > 0
    assert fd.allgather_object(one.process_set_id) == [one.process_set_id] * fd.size()
    assert one.size() == len(ranks)
    assert one.included() == (fd.rank() in ranks)
    if one.included():
        assert one.rank() == sorted(ranks).index(fd.rank())
    else:
        with pytest.raises(ValueError, match=f"rank {fd.rank()} is not in"):
            one.rank()
    assert process_set_ids_and_ranks()[one.process_set_id] == sorted(ranks)
    assert fd.remove_process_set(one) is True
    assert (one.process_set_id, one.size(), one.rank()) == (None, None, None)


def check_the_global_process_set() -> None:
    everybody = fd.global_process_set
    assert everybody.process_set_id == 0
    assert (everybody.size(), everybody.rank(), everybody.included()) == (fd.size(), fd.rank(), True)
    assert everybody.ranks == list(range(fd.size()))
    assert fd.remove_process_set(everybody) is False
    with pytest.raises(ValueError, match="already"):
        fd.add_process_set(range(fd.size()))  # type: ignore[arg-type]


def check_every_operation_among_some_ranks() -> None:
    with added(*halves()) as members:
        here = members[fd.rank() % 2]
        ranks, place, size = here.ranks or [], here.rank() or 0, here.size() or 0
        root = ranks[-1]
        parts = of_all((2 * size, 2), ranks=ranks)
        tensor, total = parts[place], reduced(parts, fd.Sum)
        rows = total[2 * place : 2 * place + 2]
        assert_same(fd.allreduce(tensor, op=fd.Sum, process_set=here), total)
        assert_same(fd.allreduce(tensor, process_set=here), reduced(parts, fd.Average))
        assert_same(fd.allreduce_(tensor.clone(), op=fd.Max, process_set=here), reduced(parts, fd.Max))
        for each in fd.grouped_allreduce([tensor, tensor], op=fd.Sum, process_set=here):
            assert_same(each, total)
        assert_same(fd.allgather(tensor, process_set=here), torch.cat(parts))
        assert_same(fd.grouped_allgather([tensor], process_set=here)[0], torch.cat(parts))
        assert_same(fd.broadcast(tensor, root, process_set=here), parts[-1])  # a global rank
        assert_same(fd.broadcast_(tensor.clone(), ranks[0], process_set=here), parts[0])
        swapped = torch.cat([part[2 * place : 2 * place + 2] for part in parts])
        assert_same(fd.alltoall(tensor, process_set=here), swapped)  # type: ignore[arg-type]
        ours, received = fd.alltoall(tensor, [2] * size, None, here)
        assert_same(ours, swapped)
        assert received.tolist() == [2] * size
        assert_same(fd.reducescatter(tensor, op=fd.Sum, process_set=here), rows)
        assert_same(fd.grouped_reducescatter([tensor], op=fd.Sum, process_set=here)[0], rows)
        fd.barrier(here)
        assert fd.broadcast_object(f"of {fd.rank()}", root, process_set=here) == f"of {root}"
        sparse = fd.sparse_allreduce_async(tensor.to_sparse(1), "sparse", fd.Sum, here)()
        assert_same(sparse.to_dense(), total)


def check_names_of_several_process_sets_do_not_meet() -> None:
    """One name, in flight in three process sets, begun in another order on each rank."""
    last = fd.size() - 1
    with added([0], [last]) as alone:
        sets = [fd.global_process_set, *[each for each in alone if each.included()]]
        turned = sets if fd.rank() % 2 else sets[::-1]
        handles = {each: fd.allreduce_async(mine(), name="one name", op=fd.Sum, process_set=each) for each in turned}
        for each in sets:
            wanted = reduced(of_all(ranks=each.ranks or []), fd.Sum)
            assert_same(fd.synchronize(handles[each]), wanted)


def check_process_sets_that_overlap_work_at_the_same_time() -> None:
    if fd.size() < 3:
        return
    rings = [[rank, (rank + 1) % fd.size()] for rank in range(fd.size())]
    with added(*rings) as members:
        mine_of = [each for each in members if each.included()]
        assert len(mine_of) == 2
        for again in range(5):
            handles = [fd.allreduce_async(mine(seed=again), op=fd.Sum, process_set=each) for each in mine_of]
            for each, handle in zip(mine_of, handles, strict=True):
                assert_same(fd.synchronize(handle), reduced(of_all(seed=again, ranks=each.ranks or []), fd.Sum))


def check_ids_are_never_given_twice() -> None:
    with added([0]) as (one,):
        number = one.process_set_id
    with added([0]) as (other,):
        assert other.process_set_id != number


def check_many_come_and_go() -> None:
    for again in range(5):
        with added(*halves()) as members:
            here = members[fd.rank() % 2]
            wanted = reduced(of_all(seed=again, ranks=here.ranks or []), fd.Sum)
            assert_same(fd.allreduce(mine(seed=again), name="again", op=fd.Sum, process_set=here), wanted)


def check_what_was_removed_cannot_be_used() -> None:
    one = fd.add_process_set([0])
    fd.remove_process_set(one)
    with pytest.raises(ValueError, match="not one of the process sets"):
        fd.allreduce(mine(), process_set=one)
    again = fd.add_process_set(one)
    assert again.process_set_id is not None
    if fd.rank() == 0:
        assert_same(fd.allreduce(mine(), process_set=one), of_rank(0))
    assert fd.remove_process_set(one)


def check_what_waits_in_a_process_set_that_is_removed_fails() -> None:
    members = fd.add_process_set([0, fd.size() - 1]) if fd.size() > 2 else None
    if members is None:
        return
    handle = fd.allreduce_async(mine(), name="left", process_set=members) if fd.rank() == 0 else None
    assert fd.remove_process_set(members)
    if handle is not None:
        with pytest.raises(fd.HorovodInternalError, match="removed"):
            fd.synchronize(handle)


def check_ranks_must_add_and_remove_the_same() -> None:
    """Nothing is added or removed then, and a right call afterwards works."""
    with pytest.raises(ValueError, match="disagree"):
        fd.add_process_set([0] if fd.rank() == 0 else [1])
    assert process_set_ids_and_ranks().keys() == {0}
    one, other = fd.add_process_set([0]), fd.add_process_set([1])
    with pytest.raises(ValueError, match="disagree"):
        fd.remove_process_set(one if fd.rank() == 0 else other)
    assert fd.remove_process_set(one) is True
    assert fd.remove_process_set(other) is True
    assert process_set_ids_and_ranks().keys() == {0}


def check_ranks_that_make_no_process_set() -> None:
    for ranks in ([], [0, 0], [-1], [fd.size()], ["0"], 3, [0.5]):
        with pytest.raises(ValueError, match=r"process set|ProcessSet"):
            fd.add_process_set(ranks)  # type: ignore[arg-type]
    with added([0]), pytest.raises(ValueError, match="already"):
        fd.add_process_set([0])


def check_a_stranger_is_refused_and_the_members_go_on() -> None:
    with added([0]) as (members,):
        if fd.rank() == 0:
            assert_same(fd.allreduce(mine(), op=fd.Sum, process_set=members), of_rank(0))
        else:
            for begin in (
                lambda: fd.allreduce(mine(), process_set=members),
                lambda: fd.allgather(mine(), process_set=members),
                lambda: fd.broadcast(mine(), 0, process_set=members),
                lambda: fd.alltoall(mine((fd.size(),)), process_set=members),
                lambda: fd.reducescatter(mine(), process_set=members),
                lambda: fd.barrier(members),
            ):
                with pytest.raises(ValueError, match=f"rank {fd.rank()} is not in"):
                    begin()


def check_a_rank_that_joined_still_leaves_its_process_sets_to_others() -> None:
    """Rank 0 has no more data; the others go on among themselves."""
    with added(range(1, fd.size())) as (others,):  # type: ignore[arg-type]
        if fd.rank() != 0:
            gathered = fd.allgather(mine(), process_set=others)
            assert_same(gathered, torch.cat(of_all(ranks=others.ranks or [])))
        assert 0 <= fd.join() < fd.size()
