"""Learning rates by step, by epoch, by loss; in the body, behind it, and in callbacks."""

import sys

import torch
import torch.nn.functional as F
from problem import BATCH, EPOCHS, Net, Samples
from torch.optim import lr_scheduler

import farandole as fd

kind = sys.argv[1]
fd.init()
model = Net()
optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))
loader = fd.elastic.DataLoader(Samples(), BATCH, seed=5)
steps = EPOCHS * len(loader)
if kind == "chained":
    scheduler = lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.ExponentialLR(optimizer, 0.95)]
    )
elif kind == "sequential":
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(optimizer, steps - 4)]
    scheduler = lr_scheduler.SequentialLR(optimizer, parts, milestones=[4])
elif kind == "onecycle":
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps + 1)
elif kind.startswith("plateau"):
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7, threshold=10.0)
elif kind == "epoch":
    scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
else:
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
losses = []


def after():
    if kind == "plateau-callback":
        scheduler.step(round(fd.mean(1.0), 6))
    elif kind in ("callback-mean", "callback-two"):
        fd.mean(losses[-1])
        scheduler.step()
    else:
        scheduler.step()


def count():
    state.counted += 1
    if fd.any(state.counted % 4 == 0):
        state.fourths = [*state.fourths, state.step]
    with torch.no_grad():
        state.total += state.counted


in_callback = kind in ("callback-two", "callback", "plateau-callback", "callback-mean")
state = fd.elastic.TorchState(
    model=model,
    optimizer=optimizer,
    loader=loader,
    scheduler=scheduler,
    after_step=[after, count] if kind == "callback-two" else [after] if in_callback else [],
    counted=0,
    fourths=[],
    total=torch.zeros(1, dtype=torch.float64),
)


@fd.elastic.run
def train(state):
    for epoch in loader.epochs(EPOCHS):
        for x, y, index in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x, index), y)
            losses.append(loss.item())
            loss.backward()
            applied = optimizer.step()
            if kind == "mean":
                fd.mean(loss.item())
            if kind in ("body", "chained", "sequential", "onecycle"):
                scheduler.step()
            elif kind in ("applied", "mean"):
                if applied:
                    scheduler.step()
            elif kind == "plateau-body":
                scheduler.step(round(fd.mean(1.0), 6))
            elif kind == "by-hand":
                for group in optimizer.param_groups:
                    group["lr"] = 0.1 / (1 + state.step)
        if kind == "epoch":
            epoch.once(scheduler.step)
        elif kind == "epoch-bare":
            scheduler.step()
        elif kind == "plateau-epoch":
            value = round(fd.mean(1.0), 6)
            epoch.once(lambda value=value: scheduler.step(value))


train(state)
