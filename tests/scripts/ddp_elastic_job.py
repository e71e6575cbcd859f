"""torch's DistributedDataParallel and ordinary optimizers in an elastic function, in the ways that people write them;
in float64, so that the result can be compared with that of one process."""

from __future__ import annotations

import argparse
import copy
import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import farandole as fd
from farandole.testing.quick_start import without_compiler
from farandole.testing.step_records import Records

SAMPLES, FEATURES, CLASSES = 210, 16, 4
LR, MOMENTUM, CLIP = 0.05, 0.9, 0.5


class Table(torch.utils.data.Dataset):
    """The same samples in every process."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(SAMPLES, FEATURES, dtype=torch.float64, generator=generator)
        self.y = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


class Net(torch.nn.Module):
    """has_norm: BatchNorm, whose buffers DDP sends. picks: samples go through one of two branches, so that in small
    shares a branch may have none."""

    def __init__(self, has_norm: bool = False, picks: bool = False) -> None:
        super().__init__()
        self.first = torch.nn.Linear(FEATURES, 24)
        self.norm = torch.nn.BatchNorm1d(24) if has_norm else torch.nn.Identity()
        self.branches = torch.nn.ModuleList(torch.nn.Linear(24, 24) for _ in range(3))
        self.last = torch.nn.Linear(24, CLASSES)
        self.picks = picks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.first(x)))
        if not self.picks:
            for branch in self.branches:
                hidden = torch.tanh(branch(hidden))
            return self.last(hidden)
        which = x[:, 0] > 1.0  # about one sample of six; the third branch is never used
        parts = hidden.clone()
        for number, rows in enumerate((which, ~which)):
            if rows.any():
                parts[rows] = self.branches[number](hidden[rows])
        return self.last(torch.tanh(parts))


def build(kind: str) -> Net:
    torch.manual_seed(0)
    return Net(has_norm=kind == "norm", picks=kind == "unused").double()


HOOKS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "hook": lambda: (None, default_hooks.allreduce_hook),
    "fp16": lambda: (None, default_hooks.fp16_compress_hook),
    "power": lambda: (
        powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=4),
        powerSGD_hook.powerSGD_hook,
    ),
}


class Training:
    """One model, in one of the ways."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.model = DistributedDataParallel(
            build(kind),
            find_unused_parameters=kind == "unused",
            static_graph=kind == "static",
            gradient_as_bucket_view=kind == "view",
            bucket_cap_mb=0.002,  # several buckets
        )
        if kind in HOOKS:
            self.model.register_comm_hook(*HOOKS[kind]())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=MOMENTUM)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 20, gamma=0.8)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=kind == "scaled")

    def body(self, x: torch.Tensor, y: torch.Tensor, is_last: bool) -> bool:
        """Whether the step was applied."""
        self.optimizer.zero_grad()
        self.backward(x, y)
        if self.kind == "clip":
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        if self.kind != "scaled":
            return bool(self.optimizer.step())
        if not is_last:
            return False
        was_applied = bool(self.scaler.step(self.optimizer))
        self.scaler.update()
        return was_applied

    def classic_body(self, x: torch.Tensor, y: torch.Tensor, number: int) -> bool:
        """The same for every third batch only."""
        if (number + 1) % 3 != 0:
            with self.model.no_sync():
                self.backward(x, y)
            return False
        self.backward(x, y)
        was_applied = self.optimizer.step()
        self.optimizer.zero_grad()
        return bool(was_applied)

    def backward(self, x: torch.Tensor, y: torch.Tensor) -> None:
        if self.kind == "chunks" and len(x) > 1:  # accumulated by hand, inside of one batch
            half = len(x) // 2
            with self.model.no_sync():
                (F.cross_entropy(self.model(x[:half]), y[:half], reduction="sum") / len(x)).backward()
            (F.cross_entropy(self.model(x[half:]), y[half:], reduction="sum") / len(x)).backward()
        elif self.kind == "twice":  # two reducing passes
            (0.25 * F.cross_entropy(self.model(x), y)).backward()
            (0.75 * F.cross_entropy(self.model(x), y)).backward()
        else:
            self.scaler.scale(F.cross_entropy(self.model(x), y)).backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=["plain"], help="one model for each")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--micro-batch-size", type=int)
    parser.add_argument("--max-local-batch", type=int)
    parser.add_argument("--slow-below", type=int, default=0, help="take more and more time below this generation")
    parser.add_argument("--result", type=Path)
    parser.add_argument("--records")
    options = parser.parse_args()
    torch.set_num_threads(1)
    without_compiler()
    fd.init()
    dist.init_process_group("farandole")

    trainings = [Training(kind) for kind in options.kinds]
    loader = fd.elastic.DataLoader(
        Table(),
        global_batch_size=25,
        seed=3,
        micro_batch_size=options.micro_batch_size,
        max_local_batch=options.max_local_batch,
        min_local_batch=2 if "norm" in options.kinds else 1,
    )
    tracked: dict[str, Any] = {}
    for number, each in enumerate(trainings[1:]):
        tracked |= {f"model_{number}": each.model, f"optimizer_{number}": each.optimizer}
    for number, each in enumerate(trainings):
        tracked |= {f"scheduler_{number}": each.scheduler, f"scaler_{number}": each.scaler}
    state = fd.elastic.TorchState(
        model=trainings[0].model,
        optimizer=trainings[0].optimizer,
        loader=loader,
        after_step=[each.scheduler.step for each in trainings],
        **tracked,
    )
    records = Records(options.records)

    @fd.elastic.run
    def train(state: fd.elastic.TorchState) -> float:
        for _ in loader.epochs(options.epochs):
            for number, (x, y) in enumerate(loader):
                records.before_step(state)  # for each micro-batch: their samples add up
                time.sleep(0.02 * 1.1**state.step if fd.generation() < options.slow_below else 0)
                for each in trainings:
                    classic = each.kind == "classic"
                    was_applied = each.classic_body(x, y, number) if classic else each.body(x, y, loader.batch.is_last)
                if was_applied:
                    records.after_step(state)
        return fd.mean(float(state.step))

    result = train(state)
    assert type(copy.deepcopy(trainings[0].model)) is DistributedDataParallel
    values = {each.kind: each.model.module.state_dict() for each in trainings}
    everything = repr([value.tolist() for each in trainings for value in each.model.parameters()])
    records.at_end(
        state,
        scheduler_last_epoch=trainings[0].scheduler.last_epoch,
        result=result,
        everything=hashlib.sha256(everything.encode()).hexdigest(),
    )
    print("overlapped:", any(each.name == "farandole-gradients" for each in threading.enumerate()))
    if options.result and fd.rank() == 0:
        torch.save(values, options.result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
