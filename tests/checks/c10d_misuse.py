"""Checks of the backend "farandole": what cannot work is said at once, in words that tell what to do."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist

import farandole as fd
from farandole.errors import ConfigError, GroupOutdated


@contextmanager
def without_default_group() -> Iterator[None]:
    dist.destroy_process_group()
    yield
    assert not dist.is_initialized()
    fd.init(default_group=True)


def check_a_size_that_contradicts_ours() -> None:
    with without_default_group():
        contradiction = {"rank": fd.rank(), "world_size": fd.size() + 1}
        with pytest.raises(ConfigError, match=f"this is rank {fd.rank()} of {fd.size()}, which may change"):
            dist.init_process_group("farandole", store=dist.HashStore(), **contradiction)
        with pytest.raises(ConfigError, match="leave rank, world_size, RANK and WORLD_SIZE out"):
            dist.init_process_group("farandole", **contradiction)


def check_a_size_that_is_ours_may_be_given() -> None:
    with without_default_group():
        dist.init_process_group("farandole", rank=fd.rank(), world_size=fd.size(), store=dist.HashStore())
        dist.barrier()
        dist.destroy_process_group()


def check_the_backend_may_be_named_for_a_device() -> None:
    with without_default_group():
        dist.init_process_group("cpu:farandole")
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == fd.size()
        dist.destroy_process_group()


def check_a_default_group_of_another_backend() -> None:
    with without_default_group(), tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        with pytest.raises(ConfigError, match=r"the default group of torch\.distributed already has the backend gloo"):
            fd.init(default_group=True)
        with pytest.raises(ConfigError, match=r"whose ranks may differ; call init_process_group\(.farandole.\)"):
            dist.new_group([0], backend="farandole")
        dist.destroy_process_group()


def check_a_group_of_another_backend_beside_ours() -> None:
    with pytest.raises((ConfigError, RuntimeError), match="has no store"):
        dist.new_group(backend="gloo")


def check_a_rendezvous_for_another_backend_is_torchs_own() -> None:
    with without_default_group(), pytest.MonkeyPatch.context() as patch:
        patch.delenv("RANK", raising=False)
        with pytest.raises(ValueError, match="environment variable RANK expected, but not set"):
            dist.init_process_group("gloo")


def check_a_group_that_was_destroyed() -> None:
    group = dist.new_group()
    dist.barrier(group)
    dist.destroy_process_group(group)
    with pytest.raises((GroupOutdated, ValueError), match="was destroyed"):
        group.barrier()


def check_operations_that_do_not_fit() -> None:
    group, size = dist.group.WORLD, fd.size()
    assert group is not None
    calls = {
        "tensors to write into": lambda: group.allgather([[torch.empty(1)] * (size + 1)], [torch.empty(1)]),
        "expected": lambda: group.allgather([[torch.empty(2)] * size], [torch.empty(1)]),
        "do not make an output of shape": lambda: group.all_gather_single(torch.empty(size + 1), torch.empty(1)),
        "do not divide": lambda: group.all_to_all_single(torch.empty(size), torch.empty(size), [1] * size, [2] * size),
        "moves dense tensors": lambda: group.broadcast([torch.empty(1, device="meta")], 0),
        "cannot reduce torch.float32 by": partial(group.allreduce, [torch.ones(1)], dist._make_nccl_premul_sum(2.0)),
    }
    for match, call in calls.items():
        with pytest.raises(ValueError, match=match):
            call()
    dist.barrier()  # nothing of it has gone to the others
