"""The weighted gradient of any world is the gradient of the full batch; sums of shares are whole (float64)."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings, strategies as st

import farandole as fd
from farandole.training.state import step
from tests.support.thread_workers import run_workers

INPUTS = 3


class Sequences(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """Sample i: a row, a target, and a number of tokens from 0 to 4 that it stands for."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(size)
        self.x = torch.randn(size, INPUTS, dtype=torch.float64, generator=generator)
        self.y = torch.randn(size, 1, dtype=torch.float64, generator=generator)
        self.tokens = torch.randint(0, 5, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index], self.tokens[index]


def net() -> torch.nn.Module:
    generator = torch.Generator().manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(INPUTS, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
    return model


def loss_of(kind: str, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    each = (model(x) - y).square().squeeze(1)
    if kind == "sum":
        return each.sum()
    if kind == "tokens":
        return (each * tokens).sum() / tokens.sum().clamp(min=1)
    return each.mean()


def train(rank: int, workers: int, data: Sequences, kind: str, **sizes: Any) -> list[Any]:
    """One epoch on one rank: of each global batch its global batch, the samples of this rank, and the final
    gradients."""
    model = net()
    optimizer = fd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), loss="sum" if kind == "sum" else "mean"
    )
    loader = fd.elastic.DataLoader(data, seed=7, **sizes)
    loader.set_world(rank, workers)
    step.on_decided(lambda batch: loader.commit(batch.global_batch))
    seen: list[Any] = []
    mine: list[int] = []
    for x, y, tokens in loader:
        optimizer.zero_grad()
        if kind == "tokens":
            fd.weight(int(tokens.sum()))
        loss_of(kind, model, x, y, tokens).backward()
        mine += loader.indices
        global_batch = loader.global_batch
        if optimizer.step():
            seen.append((global_batch, mine, [parameter.grad.clone() for parameter in model.parameters()]))
            mine = []
    return seen


@settings(deadline=None)
@given(
    size=st.integers(1, 20),
    batch=st.integers(1, 20),
    workers=st.integers(1, 5),
    micro=st.sampled_from([None, 1, 2, 3]),
    kind=st.sampled_from(["mean", "sum", "tokens"]),
)
def test_the_weighted_gradient_is_that_of_the_full_batch(
    size: int, batch: int, workers: int, micro: int | None, kind: str
) -> None:
    data = Sequences(size)
    sizes = {"global_batch_size": min(batch, size), "micro_batch_size": micro}
    by_rank = run_workers(workers, lambda rank: train(rank, workers, data, kind, **sizes))
    reference = net()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05)
    for at_step in zip(*by_rank, strict=True):
        global_batches = [global_batch for global_batch, _, _ in at_step]
        samples = [index for _, mine, _ in at_step for index in mine]
        assert (
            sum(global_batch.samples for global_batch in global_batches)
            == len(samples)
            == global_batches[0].global_samples
        )
        assert len(set(samples)) == len(samples)
        optimizer.zero_grad()
        loss_of(kind, reference, data.x[samples], data.y[samples], data.tokens[samples]).backward()
        for _, _, gradients in at_step:
            for gradient, parameter in zip(gradients, reference.parameters(), strict=True):
                assert torch.allclose(gradient, parameter.grad, rtol=1e-10, atol=1e-12)
        optimizer.step()
    assert sum(len(mine) for ranks in by_rank for _, mine, _ in ranks) == size
