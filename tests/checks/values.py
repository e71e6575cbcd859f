"""Checks of what is made of operations: parameters, and any Python value, from one rank to all or from all to all."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import pytest
import torch

import farandole as fd
from tests.checks.tensors import FLOATS, SMALL_INTEGERS, assert_same, mine, of_rank


def check_parameters_in_any_container() -> None:
    dtypes = (*FLOATS, *SMALL_INTEGERS, torch.bool)
    for make in (dict, OrderedDict, list):
        named = [(f"p{k}", mine((2, 3), dtype, k)) for k, dtype in enumerate(dtypes)]
        fd.broadcast_parameters(make(named), 1)
        for k, (_, tensor) in enumerate(named):
            assert_same(tensor, of_rank(1, (2, 3), dtypes[k], k))
    tensors = [mine(seed=k) for k in range(3)]
    fd.broadcast_parameters(tensors, root_rank=0)
    for k, tensor in enumerate(tensors):
        assert_same(tensor, of_rank(0, seed=k))


def check_named_parameters_in_another_order_on_each_rank() -> None:
    named = [(f"p{k}", mine(seed=k)) for k in range(4)]
    turned = named[fd.rank() :] + named[: fd.rank()]
    fd.broadcast_parameters(turned, 0)
    for k, (_, tensor) in enumerate(named):
        assert_same(tensor, of_rank(0, seed=k))


def check_a_whole_model_becomes_the_roots() -> None:
    torch.manual_seed(fd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model(torch.randn(8, 3))  # moves the buffers of the batch norm, a scalar among them
    state = fd.broadcast_object(model.state_dict(), 1)
    fd.broadcast_parameters(model.state_dict(), 1)
    for name, tensor in model.state_dict().items():
        assert_same(tensor, state[name])
    assert all(parameter.requires_grad for parameter in model.parameters())


def check_what_are_no_parameters() -> None:
    for wrong in (torch.zeros(2), 3, None, {1, 2}, (torch.zeros(1),)):
        with pytest.raises(ValueError, match="broadcast_parameters"):
            fd.broadcast_parameters(wrong, 0)  # type: ignore[arg-type]
    for wrong in ({"a": 1}, [("a", "b")], [3]):
        with pytest.raises(ValueError, match="not a tensor"):
            fd.broadcast_parameters(wrong, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="root_rank"):
        fd.broadcast_parameters([torch.zeros(2)], fd.size())


def check_objects_go_from_one_to_all() -> None:
    values: list[Any] = [None, {"lr": 0.1, "order": [1, 2]}, "x" * 200_000, b"", lambda x: x + 1, torch.arange(3)]
    for root in range(fd.size()):
        for value in values:
            ours = fd.broadcast_object(value if fd.rank() == root else "something else", root)
            if callable(value):
                assert ours(2) == 3
            elif isinstance(value, torch.Tensor):
                assert_same(ours, value)
            else:
                assert ours == value
    everybody = fd.global_process_set
    assert fd.broadcast_object(fd.rank(), 1, "by position", everybody) == 1
    assert fd.broadcast_object(fd.rank()) == 0
    assert fd.broadcast_object(obj=fd.rank(), root_rank=1, name="x", process_set=everybody) == 1


def check_objects_go_from_all_to_all() -> None:
    said = fd.allgather_object({"rank": fd.rank(), "text": "y" * 1000 * fd.rank()})
    assert [each["rank"] for each in said] == list(range(fd.size()))
    assert [len(each["text"]) for each in said] == [1000 * rank for rank in range(fd.size())]
    assert fd.allgather_object(None, "by position") == [None] * fd.size()
    assert fd.allgather_object(fd.rank(), name="named") == list(range(fd.size()))


def check_threads_gather_objects_under_names_of_their_own() -> None:
    found: dict[int, list[Any]] = {}

    def gather(k: int) -> None:
        for again in range(5):
            found[k] = fd.allgather_object((k, again, fd.rank()), f"thread {k}")

    threads = [threading.Thread(target=gather, args=(k,)) for k in range(3)]
    for thread in threads if fd.rank() else threads[::-1]:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {k: [(k, 4, rank) for rank in range(fd.size())] for k in range(3)}


def check_an_object_that_cannot_be_sent_is_an_error_where_it_is() -> None:
    lock = threading.Lock()
    if fd.rank() == 0:
        with pytest.raises(TypeError, match="lock"):
            fd.broadcast_object(lock, 0)
    # The others never began, in a program that has found its mistake.
    assert fd.broadcast_object("went on", 0) == "went on"
