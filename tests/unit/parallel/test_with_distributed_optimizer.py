"""DataParallel in workers whose optimizer reduces with each other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from farandole.integrations.data_parallel.data_parallel import DataParallel
from farandole.training.optim.distributed_optimizer import DistributedOptimizer
from farandole.training.state import step
from farandole.training.state.batch import Batch, GlobalBatch
from tests.support.thread_workers import run_workers

pytestmark = pytest.mark.core


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 1).double(), nn.Linear(3, 1).double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one(x), self.other(x)


def test_a_head_that_is_not_in_the_loss_has_a_gradient_of_zeros_as_without() -> None:
    """torch calls the hooks of its parameters all the same, without a gradient."""
    torch.manual_seed(0)
    x, models = torch.randn(8, 3, dtype=torch.float64), [TwoHeads() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    parallel = [DataParallel(model, threads=2) for model in models]

    def work(rank: int) -> list[torch.Tensor | None]:
        optimizer = DistributedOptimizer(torch.optim.SGD(models[rank].parameters(), lr=0.1))
        step.open(Batch(GlobalBatch(0, 0, 8, 4 * rank, 4 * rank + 4), 4 * rank, 4 * rank + 4, 0))
        parallel[rank](x[4 * rank : 4 * rank + 4])[0].square().mean().backward()
        assert optimizer.param_groups
        return [parameter.grad for parameter in models[rank].parameters()]

    found = run_workers(2, work)
    alone = TwoHeads()
    alone.load_state_dict(models[0].state_dict())
    alone(x)[0].square().mean().backward()
    for grads in found:
        for grad, parameter in zip(grads, alone.parameters(), strict=True):
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(grad, expected, rtol=0, atol=1e-12)
