"""micro_batch_size: one step for several loop bodies, also when the script counts bodies by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import farandole as fd
from farandole.base.membership import GenerationId, Placement
from farandole.errors import DataError, StepError
from farandole.training.collectives import world
from farandole.training.collectives.alone import AloneTransport
from farandole.training.state import step

pytestmark = pytest.mark.core

DATA = torch.randn(36, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    world.enter(world.World(GenerationId(1, 1, 1, ""), Placement(0, 1, 0, 1, 0, 1), AloneTransport(1)))
    yield
    step.close()
    step.on_decided(None)
    world.enter(None)


def make(**sizes: Any) -> tuple[torch.nn.Module, Any, Any]:
    torch.manual_seed(2)
    model = torch.nn.Linear(3, 1).double()
    optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    loader = fd.elastic.DataLoader(torch.utils.data.TensorDataset(DATA), seed=4, **sizes)
    return model, optimizer, fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)


def trained_on_whole_batches(clip: float | None = None) -> torch.Tensor:
    model, optimizer, state = make(global_batch_size=12)
    for (x,) in state.loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model.weight.detach()


@pytest.mark.parametrize("first", [0, 1, 2, 3])
@pytest.mark.parametrize("period", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("zeroes_at_start", [False, True])
@pytest.mark.parametrize("clips_always", [False, True])
def test_a_script_that_counts_loop_bodies_makes_the_steps_of_the_whole_batches(
    period: int, first: int, zeroes_at_start: bool, clips_always: bool
) -> None:
    """4 micro-batches for each global batch, whatever the period, and wherever the count begins."""
    model, optimizer, state = make(global_batch_size=12, micro_batch_size=3)
    trained: list[int] = []
    for i, (x,) in enumerate(state.loader, start=first):
        trained += state.loader.indices
        if zeroes_at_start and i % period == 0:
            optimizer.zero_grad()
        model(x).square().mean().backward()
        if clips_always:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if (i + 1) % period == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            if not zeroes_at_start:
                optimizer.zero_grad()
    assert state.step == 3
    assert sorted(trained) == list(range(36))
    if not zeroes_at_start:
        # What is clipped to 0.1 is clipped again, by the 1e-6 that torch adds to the norm.
        tolerance = 1e-5 if clips_always else 1e-12
        assert torch.allclose(model.weight, trained_on_whole_batches(clip=0.1), rtol=0, atol=tolerance)


def test_a_body_that_steps_each_time_makes_the_steps_of_the_whole_batches() -> None:
    model, optimizer, state = make(global_batch_size=12, micro_batch_size=5)
    applied = []
    for (x,) in state.loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        applied.append(optimizer.step())
    assert applied == [False, False, True] * 3
    assert torch.allclose(model.weight, trained_on_whole_batches(), rtol=0, atol=1e-12)


def test_without_micro_batch_size_a_body_without_a_step_is_an_error() -> None:
    model, _, state = make(global_batch_size=12)
    batches = iter(state.loader)
    (x,) = next(batches)
    model(x).square().mean().backward()
    with pytest.raises(StepError, match="without optimizer"):
        next(batches)


def test_a_body_that_never_steps_is_an_error_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farandole.training.data.elastic_loader._MOST_PADDING", 5)
    model, _, state = make(global_batch_size=12, micro_batch_size=12)
    batches = iter(state.loader)
    for _ in range(6):
        (x,) = next(batches)
        model(x).square().mean().backward()
    with pytest.raises(StepError, match="without a call of optimizer"):
        next(batches)
    assert state.loader.cursor == 0


def test_two_limits_for_one_body_are_refused() -> None:
    with pytest.raises(DataError, match="micro_batch_size=3 and max_local_batch=4"):
        make(global_batch_size=12, micro_batch_size=3, max_local_batch=4)


@pytest.mark.parametrize("period", [1, 3, 4, 5])
def test_micro_batches_of_streams_make_the_steps_of_the_whole_batches(period: int) -> None:
    results = []
    for sizes in ({}, {"micro_batch_size": 3}):
        model, optimizer, _ = make(global_batch_size=12)
        loader = fd.elastic.StreamLoader([(row,) for row in DATA], 12, streams=5, **sizes)
        state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)
        trained: list[int] = []
        for i, (x,) in enumerate(loader):
            trained += loader.indices
            model(x).square().mean().backward()
            if not sizes or (i + 1) % period == 0:
                optimizer.step()
                optimizer.zero_grad()
        assert state.step == 3
        assert sorted(trained) == list(range(36))
        results.append(model.weight.detach())
    assert torch.allclose(*results, rtol=0, atol=1e-12)
