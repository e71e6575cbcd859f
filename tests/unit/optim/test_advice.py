"""Advice about slow optimizers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from farandole.base.membership import GenerationId, Placement
from farandole.training.collectives import world
from farandole.training.collectives.alone import AloneTransport
from farandole.training.optim import options
from farandole.training.optim.distributed_optimizer import DistributedOptimizer

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    options._ADVISED.clear()
    world.enter(world.World(GenerationId(1, 1, 1, ""), Placement(0, 1, 0, 1, 0, 1), AloneTransport(1)))
    yield
    world.enter(None)


def parameters(count: int = 10_000_000) -> list[torch.Tensor]:
    return [torch.nn.Parameter(torch.zeros(count))]


def test_a_slow_loop_over_a_large_model_is_told_of_fused_once() -> None:
    with pytest.warns(RuntimeWarning, match=r"AdamW\(\.\.\., fused=True\)"):
        DistributedOptimizer(torch.optim.AdamW(parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DistributedOptimizer(torch.optim.AdamW(parameters()))


def test_one_that_cannot_be_fused_is_told_of_foreach() -> None:
    with pytest.warns(RuntimeWarning, match=r"RMSprop\(\.\.\., foreach=True\)"):
        DistributedOptimizer(torch.optim.RMSprop(parameters()))


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: torch.optim.AdamW(parameters(), fused=True),
        lambda: torch.optim.AdamW(parameters(), fused=False),
        lambda: torch.optim.AdamW(parameters(), foreach=True),
        lambda: torch.optim.AdamW(parameters(9_999_999)),
        lambda: torch.optim.LBFGS(parameters()),
    ],
)
def test_others_are_left_in_peace(optimizer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DistributedOptimizer(optimizer())
