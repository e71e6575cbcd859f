"""The ways to train data-parallel give the same parameters as one process on the whole batch: DataParallel in threads,
DistributedDataParallel and DistributedOptimizer in processes of which one is killed and replaced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import farandole as fd
from farandole.testing.running_job import all_training
from tests.scripts.four_ways_job import BATCH, EPOCHS, LR, MOMENTUM, SAMPLES, SEED, digits, network
from tests.support.jobs import SCRIPTS, RunningJob
from tests.support.pure_order import global_batches

pytestmark = pytest.mark.core

STEPS = EPOCHS * -(-SAMPLES // BATCH)


def in_one_process(wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> list[torch.Tensor]:
    """Plain torch, but for `wrap`; the order of the samples is computed apart from the library."""
    model, dataset = network(), digits()
    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM)
    parallel = wrap(model)
    for batch in global_batches(SAMPLES, BATCH, SEED, EPOCHS).values():
        x, y = dataset[[sample for _, sample in batch]]
        optimizer.zero_grad()
        F.cross_entropy(parallel(x), y).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.fixture(scope="module")
def whole() -> list[torch.Tensor]:
    return in_one_process(lambda model: model)


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-10)


def test_the_network_has_learned_something(whole: list[torch.Tensor]) -> None:
    moved = [(after - before).abs().max() for after, before in zip(whole, network().parameters(), strict=True)]
    assert STEPS >= 50
    assert min(moved) > 0.01


def test_replicas_in_three_threads_give_the_parameters_of_one_process(whole: list[torch.Tensor]) -> None:
    assert_same(in_one_process(lambda model: fd.DataParallel(model, threads=3)), whole)


@pytest.mark.parametrize("way", ["ddp", "optimizer"])
def test_workers_that_die_and_join_give_the_parameters_of_one_process(
    way: str, tmp_path: Path, whole: list[torch.Tensor]
) -> None:
    def beyond(generation: int, size: int) -> Callable[[dict[int, dict[str, Any]]], bool]:
        return lambda latest: all_training(size)(latest) and latest[0]["generation"] > generation

    result = tmp_path / "parameters.pt"
    flags = ["--way", way, "--slow-below", "3", "--result", str(result)]  # the third generation: the replacement's
    with RunningJob(["-np", "3"], SCRIPTS / "four_ways_job.py", flags, tmp_path, tmp_path / "output") as running:
        latest = running.wait_until(all_training(3), 60)
        running.kill(latest[1]["pid"])
        running.wait_until(beyond(latest[0]["generation"], 2), 60)  # without it, then with its replacement
        running.wait_until(beyond(latest[0]["generation"], 3), 60)
        assert running.wait(120) == 0
    assert_same(torch.load(result), whole)
