"""fd.weight and GradScaler: what all workers must do alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import farandole as fd
from farandole.errors import CollectiveMismatch, StepError
from farandole.training.state import step
from tests.support.thread_workers import run_workers

pytestmark = pytest.mark.core

DATA = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))


def make(rank: int, workers: int, **arguments: Any) -> tuple[torch.nn.Module, Any, Any]:
    model = torch.nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.fill_(0.5), model.bias.fill_(0.0)
    optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **arguments)
    loader = fd.elastic.DataLoader(torch.utils.data.TensorDataset(DATA), 4, seed=1)
    loader.set_world(rank, workers)
    step.on_decided(lambda batch: loader.commit(batch.global_batch))
    return model, optimizer, loader


def test_a_weight_that_only_some_workers_give_is_an_error_on_all_of_them() -> None:
    def train(rank: int) -> str:
        model, _, loader = make(rank, 2)
        (x,) = next(iter(loader))
        if rank == 1:
            fd.weight(5)
        with pytest.raises(CollectiveMismatch, match=r"ranks \[0\] did not call weight") as caught:
            model(x).mean().backward()
        return str(caught.value)

    assert len(set(run_workers(2, train))) == 1


def test_a_weight_comes_before_backward_and_belongs_to_a_mean() -> None:
    def train(_: int) -> None:
        with pytest.raises(StepError, match="only within the loop over a DataLoader"):
            fd.weight(1)
        model, _, loader = make(0, 1)
        (x,) = next(iter(loader))
        for wrong in (-1, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="0 or more"):
                fd.weight(wrong)
        model(x).mean().backward()
        with pytest.raises(StepError, match="after backward"):
            fd.weight(3)
        model, _, loader = make(0, 1, loss="sum")
        (x,) = next(iter(loader))
        fd.weight(3)
        with pytest.raises(StepError, match="a sum needs no weights"):
            model(x).sum().backward()

    run_workers(1, train)


def test_all_things_without_weight_make_a_step_of_zeros() -> None:
    def train(rank: int) -> torch.Tensor:
        model, optimizer, loader = make(rank, 2)
        (x,) = next(iter(loader))
        fd.weight(0)
        (model(x).mean() * float("nan")).backward()
        assert optimizer.step() is True
        return model.weight.grad

    assert all(not gradient.any() for gradient in run_workers(2, train))


def test_a_loss_must_be_a_mean_or_a_sum() -> None:
    with pytest.raises(ValueError, match='"mean" or "sum"'):
        make(0, 1, loss="median")


@pytest.mark.parametrize("unscales", [False, True])
def test_a_gradient_that_one_worker_has_infinite_is_skipped_and_decided_by_all(unscales: bool) -> None:
    def train(rank: int) -> Any:
        model, optimizer, loader = make(rank, 3)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        seen = []
        for index, (x,) in enumerate(loader):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            scaler.scale(loss * float("inf") if (rank, index) == (1, 0) else loss).backward()
            if unscales:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            seen.append((loader.cursor, scaler.get_scale(), step.status(), model.weight.tolist()))
        return seen

    first, *others = run_workers(3, train)
    assert all(other == first for other in others)
    assert [(cursor, scale, phase) for cursor, scale, phase, _ in first] == [(4, 32.0, "decided"), (8, 32.0, "decided")]
    assert first[0][3] == [[0.5, 0.5, 0.5]] != first[1][3]
