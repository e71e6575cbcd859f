"""An elastic loop whose model fully_shard() has divided. Each worker compares the model at the end with that of one
process, which is trained on the whole global batches."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

import farandole as fd

SAMPLES, GLOBAL_BATCH, EPOCHS = 120, 12, 5
MOST_EPOCHS = 300  # until a newcomer has joined
INDICES = torch.arange(SAMPLES)
TOKENS = torch.randint(0, 11, (SAMPLES, 5), generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(2)).double()
LABELS = torch.randint(0, 5, (SAMPLES,), generator=torch.Generator().manual_seed(3))


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = torch.nn.LayerNorm(width), torch.nn.Linear(width, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = hidden + torch.tanh(self.mix(self.norm(hidden))).cumsum(1)
        return mixed


class Language(torch.nn.Module):
    """Its head has the weights of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11, bias=False)
        self.blocks = torch.nn.ModuleList([Block(8), Block(8)])
        self.head.weight = self.embedding.weight

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(TOKENS[samples, :-1])
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), TOKENS[samples, 1:].flatten())


class Classifier(torch.nn.Module):
    """It has fewer rows than there are workers in one parameter, a buffer, and, if it is adapted, frozen parameters."""

    def __init__(self, is_adapted: bool) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(6, 17), torch.nn.Linear(17, 17)])
        self.head, self.scale = torch.nn.Linear(17, 5), torch.nn.Parameter(torch.ones(1))
        self.register_buffer("passes", torch.zeros(()))
        if is_adapted:
            self.blocks.requires_grad_(False)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        hidden = IMAGES[samples]
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return F.cross_entropy(self.head(hidden) * (self.scale + self.passes / 1000), LABELS[samples])


def by_norm(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """An optimizer whose step depends on the norm of the whole parameter."""

    class ByNorm(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for each in self.param_groups[0]["params"]:
                each.sub_(each.grad * 0.01 * each.norm())

    return ByNorm(parameters, lr=0.01)


def momentum(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def adam(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    ordered = sorted(parameters, key=lambda each: each.dim())
    return torch.optim.AdamW([{"params": ordered[:2], "lr": 0.003}, {"params": ordered[2:]}], lr=0.01)


def adagrad(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.05)


KINDS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[..., torch.optim.Optimizer]]] = {
    "tied": (Language, adam),
    "frozen": (lambda: Classifier(is_adapted=True), momentum),
    "adagrad": (lambda: Classifier(is_adapted=False), adagrad),
    "clipped": (lambda: Classifier(is_adapted=False), momentum),
    "accumulated": (Language, adam),
    "norm": (Language, by_norm),
    "changed": (Language, adam),
    "closure": (Language, adam),
    "weighed": (Language, adam),
    "average": (Language, adam),
    "two optimizers": (Language, adam),
    "whole": (Language, adam),
    "other torch": (Language, adam),
}


def divide(kind: str, model: Any) -> None:
    for block in model.blocks:
        fully_shard(block)
    if kind != "whole":
        fully_shard(model)


def accumulate(model: Any, samples: torch.Tensor) -> None:
    """Run two passes over the halves of a batch; the first one reduces nothing."""
    half = len(samples) // 2
    for is_last, part in ((False, samples[:half]), (True, samples[half:])):
        model.set_requires_gradient_sync(is_last)
        (model(part) * len(part) / len(samples)).backward()


def body(kind: str, model: Any, optimizer: torch.optim.Optimizer, samples: torch.Tensor, is_divided: bool) -> None:
    optimizer.zero_grad()
    if kind == "weighed" and is_divided:
        fd.weight(2 * len(samples))
        whole: Any = model.embedding.weight
        (model(samples) + whole.full_tensor().square().sum()).backward()
    elif kind == "closure":
        optimizer.step(lambda: backward(model, samples))
    elif kind == "accumulated":
        accumulate(model, samples) if is_divided else backward(model, samples)
    else:
        backward(model, samples)
    if kind == "clipped":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
    if kind == "changed":
        with torch.no_grad():
            next(iter(model.parameters())).mul_(0.9)
    if kind != "closure":
        optimizer.step()


def backward(model: torch.nn.Module, samples: torch.Tensor) -> float:
    loss: torch.Tensor = model(samples)
    loss.backward()
    return loss.item()


def reference(kind: str, epochs: int) -> torch.nn.Module:
    model, optimizer, scheduler = made(kind)
    for _ in range(epochs):
        for samples in INDICES.split(GLOBAL_BATCH):
            body(kind, model, optimizer, samples, is_divided=False)
            scheduler.step()
    return model


def made(kind: str, divides: bool = False) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = KINDS[kind][0]().double()
    if divides:
        divide(kind, model)
    optimizer = KINDS[kind][1]([each for each in model.parameters() if each.requires_grad])
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)


def tracked(kind: str, model: torch.nn.Module) -> dict[str, Any]:
    if kind == "average":
        return {"average": [each.detach().clone() for each in model.parameters()]}
    if kind == "two optimizers":
        return {"other": torch.optim.SGD(model.parameters(), lr=0.01)}
    return {}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--kill", type=Path, help="file that says that a worker was killed")
    options = parser.parse_args()
    fd.init(default_group=True)
    workers, kind = fd.size(), options.kind
    model, optimizer, scheduler = made(kind, divides=True)
    if kind == "other torch":
        del FSDPParam._init_sharded_param  # as where it has another name
    loader = fd.elastic.DataLoader(
        torch.utils.data.TensorDataset(INDICES), global_batch_size=GLOBAL_BATCH, shuffle=False
    )
    state: Any = fd.elastic.TorchState(
        model=model, optimizer=optimizer, loader=loader, scheduler=scheduler, epochs=0, **tracked(kind, model)
    )
    sizes = set()

    @fd.elastic.run
    def train(state: Any) -> None:
        for _ in loader.epochs(MOST_EPOCHS):
            for (samples,) in loader:
                sizes.add(fd.size())
                if options.kill and state.step == 7 and fd.rank() == 1 and not options.kill.exists():
                    options.kill.touch()
                    model.register_full_backward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
                if fd.size() < workers:
                    time.sleep(0.02)  # the newcomer is on its way, and gets a part of the epochs
                body(kind, model, optimizer, samples, is_divided=True)
                scheduler.step()
            state.epochs += 1
            if fd.any(state.epochs >= EPOCHS and fd.size() == workers):
                break

    train(state)
    found = [each.full_tensor() for each in model.parameters()]  # type: ignore[operator]
    expected = reference(kind, state.epochs)
    for one, other in zip(found, expected.parameters(), strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=0, atol=1e-9)
    torch.testing.assert_close([*model.buffers()], [*expected.buffers()], rtol=0, atol=0)
    print(f"EQUAL {sorted(sizes)}")


if __name__ == "__main__":
    main()
