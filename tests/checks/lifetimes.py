"""Checks of init() and shutdown(): many times over in one job, with and without process sets, and what is not there
before and after. Each leaves the job as init(process_sets="dynamic") made it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import farandole as fd
from farandole.integrations.horovod.named.process_sets import process_set_ids_and_ranks
from tests.checks.tensors import assert_same, mine, of_all, reduced


@contextmanager
def without_init() -> Iterator[None]:
    fd.shutdown()
    try:
        yield
    finally:
        fd.init(process_sets="dynamic")


@contextmanager
def with_process_sets(process_sets: Sequence[fd.ProcessSet] | None) -> Iterator[None]:
    """init(process_sets=...) for a while."""
    with without_init():
        fd.init(process_sets=process_sets)
        yield
        fd.shutdown()


def check_init_and_shutdown_may_be_repeated_a_hundred_times() -> None:
    place = fd.rank(), fd.size(), fd.local_rank(), fd.local_size(), fd.cross_rank(), fd.cross_size()
    fd.shutdown()
    for again in range(100 if place[1] == 2 else 20):  # more ranks take longer, and repeat the same
        fd.init()
        fd.init()  # once more changes nothing
        assert fd.is_initialized()
        assert place == (
            fd.rank(),
            fd.size(),
            fd.local_rank(),
            fd.local_size(),
            fd.cross_rank(),
            fd.cross_size(),
        )
        if again % 10 == 0:
            assert_same(fd.allreduce(mine(seed=again), op=fd.Sum), reduced(of_all(seed=again), fd.Sum))
        fd.shutdown()
        fd.shutdown()
        assert not fd.is_initialized()
    fd.init(process_sets="dynamic")


def check_nothing_is_there_before_init() -> None:
    one = fd.ProcessSet([0])
    asked: list[Callable[[], object]] = [
        fd.rank,
        fd.size,
        fd.local_rank,
        fd.local_size,
        fd.cross_rank,
        fd.cross_size,
        lambda: fd.allreduce(torch.ones(1)),
        lambda: fd.allreduce_async_(torch.ones(1)),
        lambda: fd.grouped_allreduce([torch.ones(1)]),
        lambda: fd.allgather(torch.ones(1)),
        lambda: fd.broadcast(torch.ones(1), 0),
        lambda: fd.alltoall(torch.ones(1)),
        lambda: fd.reducescatter(torch.ones(1)),
        lambda: fd.sparse_allreduce_async(torch.ones(1).to_sparse(), "x", fd.Sum),
        fd.join,
        fd.barrier,
        lambda: fd.add_process_set([0]),
        lambda: fd.broadcast_object(1),
        lambda: fd.allgather_object(1),
        lambda: fd.broadcast_parameters([torch.ones(1)], 0),
    ]
    with without_init():
        for ask in asked:
            with pytest.raises(ValueError, match="init"):
                ask()
        for each in (one, fd.global_process_set):
            assert (each.size(), each.rank(), each.included()) == (None, None, None)
        assert fd.global_process_set.ranks is None
        assert fd.remove_process_set(one) is False


def check_shutdown_forgets_the_numbers_of_unnamed_operations() -> None:
    if fd.rank() == 0:  # takes a number that the others do not take
        with pytest.raises(ValueError, match="cannot be reduced"):
            fd.allreduce_async(torch.ones(2, dtype=torch.uint8))
    with without_init():
        pass
    assert_same(fd.allreduce(mine(), op=fd.Sum), reduced(of_all(), fd.Sum))


def check_shutdown_forgets_process_sets() -> None:
    one = fd.add_process_set([0])
    with without_init():
        assert (one.process_set_id, one.size()) == (None, None)
    assert process_set_ids_and_ranks() == {0: list(range(fd.size()))}
    with pytest.raises(ValueError, match="not one of the process sets"):
        fd.allreduce(mine(), process_set=one)
    fd.add_process_set(one)
    assert fd.remove_process_set(one)


def check_what_is_outstanding_at_shutdown_ends_with_an_error() -> None:
    handle = fd.allreduce_async(mine(), name="left behind") if fd.rank() == 0 else None
    fd.barrier()
    with without_init():
        if handle is not None:
            with pytest.raises(fd.HorovodInternalError):
                fd.synchronize(handle)
    assert_same(fd.allreduce(mine(), name="left behind", op=fd.Sum), reduced(of_all(), fd.Sum))


def check_process_sets_may_be_given_to_init() -> None:
    size, rank = fd.size(), fd.rank()
    even, odd = fd.ProcessSet(range(0, size, 2)), fd.ProcessSet(range(1, size, 2))
    for _ in range(3):
        with with_process_sets([even, odd]):
            assert sorted([even.process_set_id or 0, odd.process_set_id or 0]) == [1, 2]
            assert even.included() == (rank % 2 == 0)
            here = odd if rank % 2 else even
            wanted = reduced(of_all(ranks=here.ranks or []), fd.Sum)
            assert_same(fd.allreduce(mine(), op=fd.Sum, process_set=here), wanted)
            for change in (lambda: fd.add_process_set([0, 1]), lambda: fd.remove_process_set(even)):
                with pytest.raises(ValueError, match="dynamic"):
                    change()
            fd.barrier()  # Whoever leaves earlier ends the world of those who are at work in the other process set.
        assert even.process_set_id is None


def check_process_sets_that_init_refuses() -> None:
    """On every rank, and init() may be called again."""
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: [fd.ProcessSet([0]), fd.ProcessSet([0])], "twice"),
        (lambda: [fd.ProcessSet([fd_size])], "not possible"),
        (lambda: [fd.ProcessSet(range(fd_size))], "already"),
        (lambda: [fd.ProcessSet([0 if fd_rank == 0 else 1])], "disagree"),
        (lambda: [fd.ProcessSet([0])] if fd_rank else [], "disagree"),
        (lambda: [[0]], "list of ProcessSet"),
        (lambda: "static", "list of ProcessSet"),
    ]
    fd_size, fd_rank = fd.size(), fd.rank()
    with without_init():
        for make, words in wrong:
            with pytest.raises(ValueError, match=words):
                fd.init(process_sets=make())  # type: ignore[arg-type]
            assert not fd.is_initialized()


def check_a_communicator_is_all_ranks_or_refused() -> None:
    size = fd.size()
    with without_init():
        fd.init(list(range(size)))
        fd.shutdown()
        with pytest.raises(ValueError, match="process_sets"):
            fd.init(comm=[0])
        assert not fd.is_initialized()


def check_operations_are_shown_on_rank_0s_timeline() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for marks in (False, True):
            path = Path(folder) / f"timeline.{marks}"
            fd.start_timeline(str(path), marks)
            for _ in range(2):
                fd.allreduce(mine(), name="shown")
                fd.allgather(mine(), "gathered")
            fd.stop_timeline()
            fd.barrier()  # or another rank's words about what follows are still heard
            fd.allreduce(mine(), name="hidden")
            assert path.exists() == (fd.rank() == 0)
            if path.exists():
                text = path.read_text()
                names = {event.get("name") for event in json.loads(text)}
                assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "NEGOTIATE_ALLGATHER", "ALLGATHER"} <= names
                assert "shown" in text
                assert "hidden" not in text
                assert ("CYCLE_START" in names) == marks
