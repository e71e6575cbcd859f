"""The self-tests of strict mode."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from farandole.errors import ConfigError, StepError
from farandole.training.state import numerics, step
from farandole.training.state.numerics import Arithmetic, RepeatedShards, deterministic, own_arithmetic, refuse_others


def heard_from(rank: int, *others: Arithmetic) -> Any:
    """A transport of rank `rank`, to which the ranks behind it say these things."""

    def all_gather(mine: bytes) -> list[bytes]:
        said = [msgspec.msgpack.encode(each) for each in others]
        return [*said[:rank], mine, *said[rank:]]

    return SimpleNamespace(rank=rank, all_gather=all_gather)


OTHER = Arithmetic("other", "torch 1.0, another processor")


def test_a_worker_that_rounds_otherwise_than_most_is_refused_with_both_descriptions() -> None:
    refuse_others(heard_from(0, own_arithmetic(), OTHER))
    refuse_others(heard_from(0, OTHER))  # rank 0 decides where there is no majority
    for transport in (heard_from(1, OTHER, OTHER), heard_from(1, OTHER)):
        with pytest.raises(ConfigError, match=r"rank 1 rounds otherwise than.*torch 2.*others: torch 1\.0, another"):
            refuse_others(transport)


def test_the_self_test_has_one_result() -> None:
    numerics._arithmetic.cache_clear()  # of a test with another environment
    first = own_arithmetic()
    numerics._arithmetic.cache_clear()
    assert own_arithmetic() == first


def test_operators_without_a_deterministic_form_are_named_by_torch() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    with deterministic():
        assert torch.are_deterministic_algorithms_enabled()
        with pytest.raises(RuntimeError, match=r"put_.*does not have a deterministic implementation"):
            torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]), accumulate=False)
    assert torch.are_deterministic_algorithms_enabled() == before


def test_a_shard_whose_second_gradient_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter, repeated = torch.nn.Parameter(torch.ones(2, 3)), RepeatedShards()
    monkeypatch.setattr(step, "is_rehearsal", lambda: True)
    repeated.compare(4, parameter, torch.ones(2, 3))
    repeated.compare(5, parameter, torch.ones(2, 3))
    monkeypatch.setattr(step, "is_rehearsal", lambda: False)
    repeated.compare(4, parameter, torch.ones(2, 3))
    repeated.refuse()
    repeated.compare(5, parameter, torch.full((2, 3), 1 + 2**-20))
    with pytest.raises(StepError, match=r"different gradients of Parameter,.*All layers had the same outputs"):
        repeated.refuse()
