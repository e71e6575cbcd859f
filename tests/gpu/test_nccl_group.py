"""A process group of NCCL's by itself: one rank needs one device only."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from farandole.base.env import prepare_for_nccl
from farandole.training.collectives import nccl_transport
from farandole.training.collectives.connection_pair import DTYPES
from farandole.training.collectives.kept_group import agreed_members, make_reconfigurable
from farandole.training.collectives.nccl_transport import (
    NcclGroup,
    new_group,
    new_reconfigurable_group,
    own_nccl_problem,
)
from farandole.training.collectives.torch_group import _WIDER, ExchangedStore
from farandole.training.collectives.torch_versions import can_reconfigure
from farandole.training.collectives.transport import Reduction

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(own_nccl_problem()), reason=own_nccl_problem())]

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def group() -> Iterator[NcclGroup]:
    made, store = make_group()
    yield made
    end(made, store)


def make_group() -> tuple[NcclGroup, ExchangedStore]:
    assert prepare_for_nccl() == ""
    store = ExchangedStore(5.0)
    made = NcclGroup(new_group(store, 0, 1), store, torch.device("cuda", 0))
    made.connect()
    return made, store


def end(made: NcclGroup, store: ExchangedStore) -> None:
    made.release()
    deadline_s = time.monotonic() + DEADLINE_S
    while any(thread.name.startswith("farandole-nccl") for thread in threading.enumerate()):
        assert time.monotonic() < deadline_s, "NCCL's abort does not end"
        threading.Event().wait(0.001)
    store.close()
    assert nccl_transport._stuck == []


def reduced(group: NcclGroup, flat: torch.Tensor, op: Reduction) -> torch.Tensor:
    copy = group.take(flat, _WIDER.get(flat.dtype, flat.dtype), is_read=True)
    begun = group.all_reduce(copy, op)
    deadline_s = time.monotonic() + DEADLINE_S
    while not begun.is_completed():
        assert time.monotonic() < deadline_s
    begun.wait()
    result = torch.zeros_like(flat)
    group.give(copy, result)
    return result


@pytest.mark.parametrize("op", [Reduction.SUM, Reduction.MIN, Reduction.MAX, Reduction.PRODUCT], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nccl_takes_every_dtype_and_operation(group: NcclGroup, dtype: torch.dtype, op: Reduction) -> None:
    flat = torch.arange(1000, device="cuda:0").remainder(100).to(dtype)
    assert torch.equal(reduced(group, flat, op), flat)


def test_a_broadcast_ends(group: NcclGroup) -> None:
    flat = torch.arange(1000, device="cuda:0", dtype=torch.uint8)
    copy = group.take(flat, torch.uint8, is_read=True)
    begun = group.broadcast(copy, 0)
    while not begun.is_completed():
        pass
    begun.wait()


def test_what_the_callers_stream_was_given_before_counts(group: NcclGroup) -> None:
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            flat = torch.zeros(1_000_000, device="cuda:0")
            torch.cuda._sleep(200_000_000)  # some 0.1 s
            flat.fill_(3.0)
            assert reduced(group, flat, Reduction.SUM).eq(3.0).all()


def test_whoever_shuts_a_group_down_does_not_wait_for_it() -> None:
    made, store = make_group()
    begun_s = time.monotonic()
    made.shut_down()
    made.shut_down()
    taken_s = time.monotonic() - begun_s
    end(made, store)
    print(f"shut_down: {taken_s * 1e3:.2f} ms, until all was released {time.monotonic() - begun_s:.3f} s")
    assert taken_s <= 0.005


def test_groups_leave_no_memory_behind() -> None:
    free = []
    for _ in range(8):
        made, store = make_group()
        reduced(made, torch.ones(1_000_000, device="cuda:0"), Reduction.SUM)
        end(made, store)
        del made
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info(0)[0])
    print(f"free after each group, in MB: {[each >> 20 for each in free]}")
    assert free[-1] >= free[2] - (32 << 20)


@pytest.mark.skipif(not can_reconfigure(), reason=f"torch {torch.__version__} cannot exchange the members of groups")
def test_a_group_gets_members_again_after_an_abort() -> None:
    lasting = make_reconfigurable(lambda store: new_reconfigurable_group(store, 0, 1))
    assert lasting is not None
    store = ExchangedStore(5.0)
    for _ in range(3):
        members = agreed_members([lasting.offer()])
        assert members is not None
        lasting.reconfigure(store, members, DEADLINE_S)
        made = NcclGroup(lasting.group, store, torch.device("cuda", 0), lasting)
        made.connect()
        flat = torch.arange(1000, device="cuda:0")
        assert torch.equal(reduced(made, flat, Reduction.SUM), flat)
        assert made.hand_over() is lasting
    end(made, store)
