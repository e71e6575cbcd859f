"""Trains a small model in strict mode by loops as people write them, and prints the hash of the state."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import farandole as fd
from farandole.testing.quick_start import without_compiler

Model = nn.Sequential


def model_with_statistics(inputs: int = 12, width: int = 32, outputs: int = 3) -> Model:
    return Model(nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, outputs))


class Loop:
    """A plain loop. Subclasses are loops that differ from it."""

    def __init__(self) -> None:
        self.model = model_with_statistics()
        self.optimizer: Any = fd.DistributedOptimizer(torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9))

    def tracked(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def body(self, state: Any, epoch: int, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()

    def tail(self, epoch: int) -> None:
        """The code behind the batches of an epoch."""

    def figure(self) -> float:
        """A number of the result: the least running variance."""
        return float(self.model[1].running_var.min())


class ManyBuckets(Loop):
    """Gradients in several buckets are reduced while backward() continues."""

    def __init__(self) -> None:
        self.model = model_with_statistics(width=512)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer = fd.DistributedOptimizer(optimizer, bucket_mb=0.001)


class WithoutStatistics(Loop):
    """A model whose gradients do not depend on the number of shards, but for rounding; the figure is its size."""

    def __init__(self) -> None:
        self.model = Model(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 3))
        self.optimizer: Any = self.wrap(torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9))

    def wrap(self, optimizer: torch.optim.Optimizer) -> Any:
        return fd.DistributedOptimizer(optimizer)

    def figure(self) -> float:
        return float(sum(parameter.detach().double().norm() for parameter in self.model.parameters()))


class WeighedLoss(WithoutStatistics):
    """A mean over those items that count, in some batches without a backward pass."""

    def body(self, state: Any, epoch: int, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        counts = x[:, 0] > 0.3
        fd.weight(counts.sum())
        if counts.any():
            F.cross_entropy(self.model(x[counts]), y[counts]).backward()
        self.optimizer.step()


class SummedLoss(WithoutStatistics):
    """A sum over all samples."""

    def wrap(self, optimizer: torch.optim.Optimizer) -> Any:
        return fd.DistributedOptimizer(optimizer, loss="sum")

    def body(self, state: Any, epoch: int, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        (0.1 * F.cross_entropy(self.model(x), y, reduction="sum")).backward()
        self.optimizer.step()


class ChangedGradients(WithoutStatistics):
    """Each loop body clips the gradients, and changes them, whether they are zeros or not."""

    def body(self, state: Any, epoch: int, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(self.model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad.add_(parameter.detach(), alpha=0.01)
        self.optimizer.step()


class HalfPrecision(WithoutStatistics):
    """A sum over all shards would overflow where their mean does not."""

    def __init__(self) -> None:
        super().__init__()
        self.model.half()

    def body(self, state: Any, epoch: int, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        bias = self.model[2].bias
        (F.cross_entropy(self.model(x.half()).float(), y) + 30_000 * bias.sum()).backward()
        assert bias.grad is not None
        bias.grad.div_(100_000)
        self.optimizer.step()


class SkippedLoss(Loop):
    """Some losses are not trained, as those that are not finite."""

    def body(self, state: Any, epoch: int, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        if state.step % 2:
            loss.backward()
        self.optimizer.step()


class DroppedGradients(Loop):
    """zero_grad() between backward() and step()."""

    def body(self, state: Any, epoch: int, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), y).backward()
        self.optimizer.zero_grad()
        self.optimizer.step()


class DroppedGradientsOfOne(Loop):
    """Two optimizers for one loss, of which one drops its gradients in each second step."""

    def __init__(self) -> None:
        self.model = model_with_statistics()
        self.optimizer, self.other = (
            fd.DistributedOptimizer(torch.optim.SGD(self.model[place].parameters(), lr=0.1)) for place in (0, 3)
        )

    def tracked(self) -> dict[str, Any]:
        return {**super().tracked(), "other": self.other}

    def body(self, state: Any, epoch: int, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.other.zero_grad()
        F.cross_entropy(self.model(x), y).backward()
        if state.step % 2:
            self.other.zero_grad()
        self.optimizer.step()
        self.other.step()


class Gan(Loop):
    """The loss of the generator depends on the step of the discriminator."""

    def __init__(self) -> None:
        self.model, self.other_model = model_with_statistics(outputs=12), model_with_statistics(outputs=1)
        self.optimizer, self.other = (
            fd.DistributedOptimizer(torch.optim.SGD(each.parameters(), lr=0.1))
            for each in (self.model, self.other_model)
        )

    def tracked(self) -> dict[str, Any]:
        return {**super().tracked(), "other_model": self.other_model, "other": self.other}

    def body(self, state: Any, epoch: int, x: torch.Tensor, y: torch.Tensor) -> None:
        made = self.model(torch.randn_like(x))
        self.other.zero_grad()
        (F.softplus(-self.other_model(x)) + F.softplus(self.other_model(made.detach()))).mean().backward()
        self.other.step()
        self.optimizer.zero_grad()
        F.softplus(-self.other_model(made)).mean().backward()
        self.optimizer.step()


class SchedulerInBody(Loop):
    """The figure is the learning rate."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 4)

    def tracked(self) -> dict[str, Any]:
        return {**super().tracked(), "scheduler": self.scheduler}

    def body(self, state: Any, epoch: int, x: torch.Tensor, y: torch.Tensor) -> None:
        super().body(state, epoch, x, y)
        self.scheduler.step()

    def figure(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


class AverageInBody(Loop):
    def __init__(self) -> None:
        super().__init__()
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        self.average = torch.optim.swa_utils.AveragedModel(self.model, multi_avg_fn=average)

    def tracked(self) -> dict[str, Any]:
        return {**super().tracked(), "average": self.average}

    def body(self, state: Any, epoch: int, x: torch.Tensor, y: torch.Tensor) -> None:
        super().body(state, epoch, x, y)
        self.average.update_parameters(self.model)

    def figure(self) -> float:
        return float(self.average.module[0].weight.double().norm())


class LateAverage(AverageInBody):
    """It begins when nobody expects it."""

    def body(self, state: Any, epoch: int, x: torch.Tensor, y: torch.Tensor) -> None:
        (super() if state.step >= 4 else super(AverageInBody, self)).body(state, epoch, x, y)


class LateAverageUnseen(AverageInBody):
    """The same, through `.data`."""

    def body(self, state: Any, epoch: int, x: torch.Tensor, y: torch.Tensor) -> None:
        super(AverageInBody, self).body(state, epoch, x, y)
        if state.step >= 2:
            for mine, theirs in zip(self.average.module.parameters(), self.model.parameters(), strict=True):
                mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)


class TeacherInBody(AverageInBody):
    """The loss depends on an average of weights that moves before it, through `.data`."""

    def body(self, state: Any, epoch: int, x: torch.Tensor, y: torch.Tensor) -> None:
        for mine, theirs in zip(self.average.module.parameters(), self.model.parameters(), strict=True):
            mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)
        self.optimizer.zero_grad()
        out = self.model(x)
        (F.cross_entropy(out, y) + 0.1 * F.mse_loss(out, self.average(x).detach())).backward()
        self.optimizer.step()


class NoiseOnWeights(Loop):
    """Weights decay before each step, and gradients are those of weights with noise."""

    def body(self, state: Any, epoch: int, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        with torch.no_grad():
            self.model[3].weight.add_(0.01)
        F.cross_entropy(self.model(x), y).backward()
        with torch.no_grad():
            self.model[3].weight.sub_(0.01).mul_(0.99)
        self.optimizer.step()

    def figure(self) -> float:
        return float(self.model[3].weight.double().norm())


class Counting(nn.Linear):
    """Counts its forward passes, in its extra state; the output depends on it."""

    passes = 0

    def get_extra_state(self) -> int:
        return self.passes

    def set_extra_state(self, state: int) -> None:
        self.passes = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return super().forward(x) * (1 + 0.1 * self.passes)


class CountingLayer(Loop):
    def __init__(self) -> None:
        self.model = Model(Counting(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
        self.optimizer = fd.DistributedOptimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def figure(self) -> float:
        return float(self.model[0].passes)


class ClampedWeights(Loop):
    """What gives the same however often it runs is no error."""

    def body(self, state: Any, epoch: int, x: torch.Tensor, y: torch.Tensor) -> None:
        super().body(state, epoch, x, y)
        with torch.no_grad():
            self.model[0].weight.clamp_(-0.29, 0.29)  # none of the first ones is larger


class LossOfEpoch(Loop):
    """The loss depends on the epoch, and a worker is lost behind the batches of the first one."""

    def body(self, state: Any, epoch: int, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        (F.cross_entropy(self.model(x), y) / (1 + epoch)).backward()
        self.optimizer.step()

    def tail(self, epoch: int) -> None:
        if fd.generation() == 1 and fd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class ChangedWeight(Loop):
    """A weight of rank 0 changes behind the batches of the first epoch."""

    def tail(self, epoch: int) -> None:
        if epoch == 0 and fd.rank() == 0:
            with torch.no_grad():
                self.model[0].bias.add_(1.0)


LOOPS: dict[str, Callable[[], Loop]] = {
    each.__name__: each
    for parent in (Loop, WithoutStatistics, AverageInBody)
    for each in (parent, *parent.__subclasses__())
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--loop", choices=LOOPS, required=True)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--audit", type=float, default=0.0)
    parser.add_argument("--lost-at", type=int, help="the step at which rank 1 ends")
    options = parser.parse_args()
    without_compiler()
    fd.init()
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(44, 12, generator=generator), torch.randint(0, 3, (44,), generator=generator)
    loader = fd.elastic.DataLoader(
        torch.utils.data.TensorDataset(x, y), 16, seed=5, shards=options.shards, audit=options.audit, min_local_batch=2
    )
    loop = LOOPS[options.loop]()
    state: Any = fd.elastic.TorchState(loader=loader, **loop.tracked())

    @fd.elastic.run
    def train(state: Any) -> None:
        for epoch in loader.epochs(2):
            for x, y in loader:
                if state.step == options.lost_at and fd.rank() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                loop.body(state, epoch, x, y)
            loop.tail(epoch)

    train(state)
    print(f"rank {fd.rank()} of {fd.size()}: {state.hash()} after {state.step} steps, figure {loop.figure():.4f}")


if __name__ == "__main__":
    main()
