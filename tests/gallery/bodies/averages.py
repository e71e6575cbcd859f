"""Averaged and slowly following models: EMA, SWA, teachers, queues."""

import copy
import sys

import torch
import torch.nn.functional as F
from problem import BATCH, EPOCHS, Net, Samples
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

import farandole as fd

kind = sys.argv[1]
fd.init()
model = Net(*([torch.nn.BatchNorm1d(8)] if kind == "swa-norm" else []))
ema = copy.deepcopy(model).requires_grad_(False)
if kind.startswith(("averaged", "swa")):
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9) if kind == "averaged" else None)
optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
loader = fd.elastic.DataLoader(Samples(), BATCH, seed=5, min_local_batch=2 if kind == "swa-norm" else 1)
evaluation = fd.elastic.EvalLoader(Samples(30), 5)


class Queue(torch.nn.Module):
    """MoCo's: the newest keys take the place of the oldest."""

    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(24, 1, dtype=torch.float64))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def push(self, keys):
        start = int(self.place)
        self.keys[start : start + len(keys)] = keys
        self.place.fill_((start + len(keys)) % len(self.keys))


def follow(decay=0.9):
    with torch.no_grad():
        for mine, theirs in zip(ema.parameters(), model.parameters(), strict=True):
            mine.mul_(decay).add_(theirs, alpha=1 - decay)


def follow_by_data(decay=0.9):
    for mine, theirs in zip(ema.parameters(), model.parameters(), strict=True):
        mine.data = mine.data * decay + theirs.data * (1 - decay)


def follow_in_data(decay=0.9):
    for mine, theirs in zip(ema.parameters(), model.parameters(), strict=True):
        mine.data.mul_(decay).add_(theirs.data, alpha=1 - decay)


def exchange():
    """The averaged weights and the trained ones, by their storages."""
    for mine, theirs in zip(ema.parameters(), model.parameters(), strict=True):
        mine.data, theirs.data = theirs.data, mine.data


def evaluate():
    right = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for x, y, _ in evaluation:
            right += (model(x) - y).square().sum()
    return fd.mean(right.item() / max(1, evaluation.samples), weight=evaluation.samples)


queue = Queue()
swa = SWALR(optimizer, swa_lr=0.05, anneal_epochs=1) if kind == "swa-epoch" else None
state = fd.elastic.TorchState(
    model=model,
    optimizer=optimizer,
    loader=loader,
    after_step=[follow] if kind == "callback" else [],
    ema=ema,
    queue=queue,
    swa=swa,
    shadow=[parameter.detach().clone() for parameter in model.parameters()] if kind == "tensors" else [],
    scores=[],
)


@fd.elastic.run
def train(state):
    for _ in loader.epochs(EPOCHS):
        for x, y, index in loader:
            if kind in ("before", "moco"):
                follow()
            elif kind == "in-data-before" or (kind == "in-data-late" and state.step >= 4):
                follow_in_data()
            optimizer.zero_grad()
            out = model(x, index)
            loss = F.mse_loss(out, y)
            if kind == "teacher":
                loss = loss + 0.1 * F.mse_loss(out, ema(x))
            elif kind == "byol":
                loss = loss + 0.1 * F.mse_loss(out, ema(x.flip(1)))
            elif kind == "moco":
                with torch.no_grad():
                    keys = fd.allgather(ema(x), name="keys")
                loss = loss + 0.1 * (out * queue.keys.T).square().mean()
            loss.backward()
            applied = optimizer.step()
            if kind == "moco" and applied:
                queue.push(keys)
            if kind in ("after", "teacher", "byol", "swapped") or (kind == "if-applied" and applied):
                follow()
            elif kind in ("by-data", "exchanged"):
                follow_by_data()
            elif kind == "in-data":
                follow_in_data()
            elif kind == "loaded":
                ours, theirs = ema.state_dict(), model.state_dict()
                ema.load_state_dict({name: 0.9 * ours[name] + 0.1 * theirs[name] for name in ours})
            elif kind in ("averaged", "swa", "swa-norm"):
                ema.update_parameters(model)
            elif kind == "tensors":
                for mine, theirs in zip(state.shadow, model.parameters(), strict=True):
                    mine.lerp_(theirs.detach(), 0.1)
            elif kind == "new-tensors":
                state.shadow = [theirs.detach() * 0.5 for theirs in model.parameters()]
        if kind == "swapped":  # store, copy, evaluate, restore
            kept = [parameter.detach().clone() for parameter in model.parameters()]
            with torch.no_grad():
                for mine, theirs in zip(model.parameters(), ema.parameters(), strict=True):
                    mine.copy_(theirs)
            score = evaluate()
            with torch.no_grad():
                for mine, before in zip(model.parameters(), kept, strict=True):
                    mine.copy_(before)
            state.scores = [*state.scores, score]
        elif kind == "exchanged":
            exchange()
            state.scores = [*state.scores, evaluate()]
            exchange()
        elif kind == "loaded":
            kept = copy.deepcopy(model.state_dict())
            model.load_state_dict(ema.state_dict())
            state.scores = [*state.scores, evaluate()]
            model.load_state_dict(kept)
        elif kind == "swa-epoch":
            ema.update_parameters(model)
            swa.step()
    if kind == "swa-norm":
        update_bn(torch.utils.data.DataLoader(Samples(30), 10), ema)


train(state)
