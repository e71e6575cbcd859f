"""Trains small networks side by side, each with an optimizer of another kind, while workers die and are replaced; each
worker writes down everything that came of it."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from optimizer_kinds import (
    BATCH,
    EPOCHS,
    SEED,
    STEPS,
    TORCH,
    WRITTEN,
    LookaheadList,
    ScheduleFree,
    dataset,
    loss_of,
    network,
    sam,
    whole,
)

import farandole as fd
from farandole.testing.quick_start import without_compiler

KILLED_AT = (9, 15, 3)
"""As many of these steps as places of --die have a death. All are behind an uncommitted step, and evaluate."""


class Job:
    """What all bodies need.

    state  set when it is made
    """

    state: Any

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self._deaths = sorted(KILLED_AT[: len(options.die)])
        self.joined = 0  # the first generation that this worker has trained in

    def wait(self) -> None:
        """After a death, train more and more slowly until the replacement has come."""
        self.joined = self.joined or fd.generation()
        passed = [at for at in self._deaths if at < self.state.step]
        if fd.generation() < 1 + 2 * len(passed):
            time.sleep(0.1 * 1.7 ** (self.state.step - passed[-1]))

    def die(self, place: str) -> None:
        """Once in the job, here, if this is the place for a death in this step."""
        places = dict(zip(self._deaths, self.options.die, strict=True))
        mark = self.options.folder / f"killed-{self.state.step}"
        if places.get(self.state.step) == place and fd.rank() == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, models: dict[str, torch.nn.Module], optimizers: dict[str, torch.optim.Optimizer]) -> None:
        found = {name: whole(model, optimizers[name]) for name, model in models.items()}
        path = self.options.folder / f"worker-{os.getpid()}.pt"
        torch.save({"kinds": found, "steps": self.state.step, "joined": self.joined}, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)


def side_by_side(job: Job) -> None:
    """Several optimizers: the step is theirs together. Dies between the steps of two of them."""
    makers = {"torch": TORCH, "written": WRITTEN}[job.options.kinds]
    models = torch.nn.ModuleDict({name.replace(".", ""): network() for name in makers})
    plain = {name: make(list(models[name].parameters())) for name, make in makers.items()}
    module: Any = models
    optimizers = plain
    if job.options.way == "ddp":
        torch.distributed.init_process_group("farandole")
        module = torch.nn.parallel.DistributedDataParallel(Together(models))
        for name, each in plain.items():  # Muon has only some: the others stay as they are
            _freeze_others(models[name], each)
    else:
        module = Together(models)
        optimizers = {name: fd.DistributedOptimizer(each) for name, each in plain.items()}
    loader = fd.elastic.DataLoader(dataset(), global_batch_size=BATCH, seed=SEED)
    first, *others = optimizers
    tracked = {f"optimizer_{place}": optimizers[name] for place, name in enumerate(others)}
    job.state = fd.elastic.TorchState(model=module, optimizer=optimizers[first], loader=loader, **tracked)

    @fd.elastic.run
    def train(state: fd.elastic.TorchState) -> None:
        for _ in loader.epochs(EPOCHS):
            for x, y in loader:
                job.wait()
                for optimizer in optimizers.values():
                    optimizer.zero_grad()
                module(x, y).backward()
                job.die("after backward")
                for place, optimizer in enumerate(optimizers.values()):
                    optimizer.step()
                    if place == len(optimizers) // 2:
                        job.die("in mid-step")

    train(job.state)
    job.write({name: models[name] for name in makers}, optimizers)


class Together(torch.nn.Module):
    """One loss for all of them, so that there is one backward pass."""

    def __init__(self, models: torch.nn.ModuleDict) -> None:
        super().__init__()
        self.models = models

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.stack([loss_of(model, x, y) for model in self.models.values()]).sum()


def _freeze_others(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    moved = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in moved)


def alone(job: Job) -> None:
    """One optimizer, in a loop body of its own form."""
    model = network()
    parameters = list(model.parameters())
    kind = job.options.kinds
    base: Any
    if kind.startswith("SAM"):
        base = sam(parameters)
    elif kind.startswith("schedule-free"):
        base = ScheduleFree(parameters, lr=0.2)
    elif kind.startswith("Lookahead"):
        base = LookaheadList(torch.optim.Adam(parameters, lr=0.02))
    else:
        base = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    module: Any = model
    optimizer = base
    if job.options.way == "ddp":
        torch.distributed.init_process_group("farandole")
        module = torch.nn.parallel.DistributedDataParallel(model)
    else:
        optimizer = fd.DistributedOptimizer(base)
    loader = fd.elastic.DataLoader(dataset(), global_batch_size=BATCH, seed=SEED)
    job.state = fd.elastic.TorchState(model=module, optimizer=optimizer, loader=loader)
    body = BODIES[kind]

    @fd.elastic.run
    def train(state: fd.elastic.TorchState) -> None:
        for _ in loader.epochs(EPOCHS):
            for x, y in loader:
                job.wait()
                body(job, module, optimizer, x, y)

    train(job.state)
    job.write({kind: model}, {kind: optimizer})


def two_steps(job: Job, model: torch.nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    job.die("in the first backward pass")
    loss_of(model, x, y).backward()
    optimizer.first_step(zero_grad=True)
    job.die("in the second backward pass")
    loss_of(model, x, y).backward()
    optimizer.second_step(zero_grad=True)
    job.die("after the step")


def two_steps_by_closure(job: Job, model: torch.nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    def closure() -> torch.Tensor:
        job.die("in the second backward pass")
        loss = loss_of(model, x, y)
        loss.backward()
        return loss

    job.die("in the first backward pass")
    loss_of(model, x, y).backward()
    assert torch.isfinite(optimizer.step(closure))
    optimizer.zero_grad()


def by_closure(job: Job, model: torch.nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        job.die("in the first backward pass")
        loss = loss_of(model, x, y)
        loss.backward()
        return loss

    assert torch.isfinite(optimizer.step(closure))


def evaluating(job: Job, model: torch.nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """At the averaged point, before the step: it has to be taken back when a worker is lost meanwhile."""
    optimizer.zero_grad()
    loss_of(model, x, y).backward()
    if job.state.step % 3 == 0:
        optimizer.eval()
        with torch.no_grad():
            loss_of(model, x, y)
        job.die("in evaluation")
        fd.mean(1.0)
        optimizer.train()
    optimizer.step()


def as_usual(job: Job, model: torch.nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    job.die("in the first backward pass")
    loss_of(model, x, y).backward()
    optimizer.step()
    job.die("after the step")


BODIES: dict[str, Callable[..., None]] = {
    "SAM": two_steps,
    "SAM, closure": two_steps_by_closure,
    "SGD, closure": by_closure,
    "schedule-free": evaluating,
    "Lookahead": as_usual,
}


def committing(job: Job) -> None:
    """Horovod's way: named reductions, commits. Everybody has the whole batch, so that the mean is the same."""
    models = {name: network() for name in WRITTEN}
    optimizers = {
        name: fd.DistributedOptimizer(
            make(list(models[name].parameters())),
            named_parameters=[(f"{name}.{key}", p) for key, p in models[name].named_parameters()],
        )
        for name, make in WRITTEN.items()
    }
    x, y = dataset().tensors
    tracked: dict[str, Any] = {f"model_{place}": each for place, each in enumerate(models.values())}
    tracked |= {f"optimizer_{place}": each for place, each in enumerate(optimizers.values())}
    job.state = state = fd.elastic.TorchState(step=0, **tracked)

    @fd.elastic.run
    def train(state: fd.elastic.TorchState) -> None:
        while state.step < STEPS:
            job.wait()
            for name, optimizer in optimizers.items():
                optimizer.zero_grad()
                loss_of(models[name], x, y).backward()
                if name == "SOAP":
                    job.die("in mid-step")
                optimizer.step()
            state.step += 1
            if state.step % 2 == 0:
                state.commit()

    train(state)
    job.write(dict(models), dict(optimizers))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kinds", required=True, help="torch, written, or the name of a body")
    parser.add_argument("--way", choices=["optimizer", "ddp", "horovod"], default="optimizer")
    parser.add_argument("--die", nargs="+", help="places at which a worker kills itself, one after another")
    options = parser.parse_args()
    torch.set_num_threads(1)
    without_compiler()
    fd.init()
    job = Job(options)
    if options.way == "horovod":
        committing(job)
    else:
        (side_by_side if options.kinds in ("torch", "written") else alone)(job)


if __name__ == "__main__":
    main()
