"""Trains one of several small models in strict mode, and prints a SHA-256 of all that the steps have left: for
comparing jobs of different worlds, and disturbed ones with quiet ones."""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn

import farandole as fd
from farandole.testing.quick_start import without_compiler
from farandole.testing.step_records import Records
from farandole.training.state import step

SAMPLES, GLOBAL_BATCH, CLASSES = 88, 24, 5


class Images(torch.utils.data.Dataset):
    """Pictures that are shifted and made noisy each time that one is fetched."""

    def __init__(self, side: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
        self.pictures = torch.randn(SAMPLES, 3, side, side, generator=generator) + self.labels[:, None, None, None] / 2

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        shift = int(torch.randint(-2, 3, ()))
        picture = torch.roll(self.pictures[index], shift, dims=-1)
        return picture + 0.1 * torch.randn_like(picture), self.labels[index]


class Words(torch.utils.data.Dataset):
    """Sequences of small numbers, of which each follows from those before it."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = (torch.arange(13) * (index % 7 + 1) + index) % 11
        return numbers[:-1], numbers[1:]


class Residual(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = convolution(channels, width, stride), convolution(width, width, 1)
        self.short = nn.Identity() if channels == width and stride == 1 else convolution(channels, width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.short(x) + self.second(F.relu(self.first(x))))


def convolution(channels: int, width: int, stride: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width))


def resnet() -> nn.Module:
    """The 18 layers of ResNet-18, with few channels."""
    blocks, channels = [], 8
    for width in (8, 12, 16, 20):
        blocks += [Residual(channels, width, 1 if width == 8 else 2), Residual(width, width, 1)]
        channels = width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)]
    return nn.Sequential(convolution(3, 8, 1), nn.ReLU(), *blocks, *head)


class Gpt(nn.Module):
    """Two layers with dropout everywhere."""

    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, width), nn.Embedding(12, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = self.words(x) + self.places.weight[: x.shape[1]]
        return self.head(self.layers(x, mask=mask, is_causal=True))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(192, 64),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, CLASSES),
    )


def state_hash(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Parameters, buffers and the optimizer's state, to the last bit."""
    found = hashlib.sha256()
    tensors = list(getattr(model, "module", model).state_dict().items())
    for number, entry in sorted(optimizer.state_dict()["state"].items()):
        tensors += [(f"{number}.{name}", value) for name, value in sorted(entry.items()) if value is not None]
    for name, tensor in tensors:
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Flips:
    """A machine that computes wrongly: a bit of a gradient flips in the backward pass of one worker.

    steps      the steps in which it does, "7" or "7-9"
    kind       "once": in the first run of the loop body for a shard of the step; "always": in each run, the same bit;
               "random": in each run, another bit
    worker     the worker's name, or under torchrun its rank
    again      only in shards that are computed again for an audit; else only in its own
    """

    def __init__(self, text: str, model: nn.Module, state: Any) -> None:
        self._worker, steps, self._kind, where = (text or "none:0:once:own").split(":")
        first, _, last = steps.partition("-")
        self._steps, self._is_again = range(int(first), int(last or first) + 1), where == "again"
        self._state, self._done, self._random = state, set[tuple[int, int]](), numpy.random.default_rng()
        if self._worker == os.environ.get("FARANDOLE_WORKER", os.environ.get("RANK")):
            next(iter(model.parameters())).register_hook(self._flip)

    def _flip(self, gradient: torch.Tensor) -> torch.Tensor | None:
        batch = self._state.loader.batch
        key = self._state.step, batch.shard
        if self._state.step not in self._steps or batch.is_audit != self._is_again or step.is_rehearsal():
            return None
        if self._kind == "once" and key in self._done:
            return None
        self._done.add(key)
        wrong = gradient.clone()
        bits = wrong.view(-1).view(torch.int32)
        is_random = self._kind == "random"
        place, bit = (int(self._random.integers(most)) if is_random else 3 for most in (len(bits), 22))
        bits[place] ^= 1 << bit
        print(f"flipped bit {bit} of shard {batch.shard} in step {self._state.step}", flush=True)
        return wrong


def slowness(slow: list[float] | None, step: int) -> float:
    """The time of this worker for a step, relative to that of the others."""
    return slow[1] if slow and fd.rank() == slow[0] and slow[2] <= step < slow[3] else 1.0


MODELS = {"mlp": mlp, "resnet": resnet, "gpt": Gpt}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--shards", type=int)
    parser.add_argument("--micro", type=int, help="samples of one loop body: gradients are accumulated")
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--slow-below", type=int, default=0, help="steps take this long below this generation only")
    parser.add_argument("--plain", action="store_true", help="not strict")
    parser.add_argument("--ddp", action="store_true", help="a DistributedDataParallel and an optimizer of torch")
    parser.add_argument("--audit", type=float)
    parser.add_argument("--flip", default="", help="WORKER:STEPS:once|always|random:own|again; see Flips")
    parser.add_argument("--break", dest="broken", choices=["operator", "noise", "threads", "mean"])
    parser.add_argument("--balance", choices=["auto", "off"])
    parser.add_argument("--sample-s", type=float, default=0.0, help="the time that a sample takes")
    parser.add_argument(
        "--slow", type=float, nargs=4, metavar=("RANK", "FACTOR", "FROM", "UNTIL"), help="a rank is slow in these steps"
    )
    parser.add_argument("--records")
    options = parser.parse_args()
    without_compiler()
    fd.init()
    torch.manual_seed(1)
    model = MODELS[options.model]()
    if options.model == "mlp":
        base: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    else:
        base = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    optimizer = base if options.ddp else fd.DistributedOptimizer(base)
    if options.ddp:
        torch.distributed.init_process_group("farandole")
        model = nn.parallel.DistributedDataParallel(model)
    loader = fd.elastic.DataLoader(
        Words() if options.model == "gpt" else Images(8),
        GLOBAL_BATCH,
        seed=5,
        num_workers=options.num_workers,
        micro_batch_size=options.micro,
        min_local_batch=2 if options.model == "resnet" else 1,
        strict=False if options.plain else None,
        shards=options.shards,
        audit=options.audit,
        balance=options.balance,
    )
    if options.broken == "threads" and fd.rank() == 1:
        torch.set_num_threads(2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * len(loader))
    state = fd.elastic.TorchState(
        model=model, optimizer=optimizer, loader=loader, scheduler=scheduler, after_step=[scheduler.step]
    )
    Flips(options.flip, model, state)
    records, noise = Records(options.records), numpy.random.default_rng()

    @fd.elastic.run
    def train(state: fd.elastic.TorchState) -> None:
        for _ in loader.epochs(options.epochs):
            for x, y in loader:
                records.before_step(state)
                time.sleep(options.step_s if not options.slow_below or fd.generation() < options.slow_below else 0)
                time.sleep(len(x) * options.sample_s * slowness(options.slow, state.step))
                optimizer.zero_grad()
                if options.broken == "operator":
                    x.put_(torch.tensor([0]), torch.tensor([1.0]))
                elif options.broken == "noise":
                    x = x + noise.normal(0, 1e-6, tuple(x.shape)).astype("float32")
                with torch.autocast("cpu", torch.bfloat16, enabled=options.model == "gpt"):
                    loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
                loss.backward()
                if options.broken == "mean":
                    fd.mean(loss)
                if options.model != "gpt":
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                if optimizer.step():
                    records.after_step(state)

    train(state)
    records.at_end(state)
    print(f"rank {fd.rank()} of {fd.size()}: {state_hash(model, optimizer)} after {state.step} steps", flush=True)


if __name__ == "__main__":
    main()
