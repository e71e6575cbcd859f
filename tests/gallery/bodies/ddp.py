"""torch's DistributedDataParallel and ordinary optimizers, on Farandole's backend."""

import copy
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from problem import BATCH, EPOCHS, Net, Samples
from torch.nn.parallel import DistributedDataParallel

import farandole as fd

kind = sys.argv[1]
fd.init()
dist.init_process_group("farandole")
net = Net()
ema = copy.deepcopy(net).requires_grad_(False)
model = DistributedDataParallel(net, bucket_cap_mb=0.0002, gradient_as_bucket_view="view" in kind)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
limit = {"micro_batch_size": 2} if "micro" in kind else {}
loader = fd.elastic.DataLoader(Samples(), BATCH, seed=5, **limit)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, enabled=kind.startswith("scaler"))
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
state = fd.elastic.TorchState(
    model=model, optimizer=optimizer, loader=loader, scaler=scaler, ema=ema, scheduler=scheduler, total=0
)


@fd.elastic.run
def train(state):
    for _ in loader.epochs(EPOCHS):
        for x, y, index in loader:
            optimizer.zero_grad()
            if kind == "no-sync" and len(x) > 1:
                with model.no_sync():
                    (F.mse_loss(model(x[:1], index[:1]), y[:1]) / len(x)).backward()
                (F.mse_loss(model(x[1:], index[1:]), y[1:]) * (len(x) - 1) / len(x)).backward()
            else:
                loss = F.mse_loss(model(x, index), y)
                scaler.scale(loss).backward()
            if kind == "clip":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            elif "log" in kind:
                assert all(parameter.grad.norm() >= 0 for parameter in model.parameters())
            elif kind == "scaler-clip":
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            elif kind == "all-reduce":
                total = torch.tensor([float(len(x))])
                dist.all_reduce(total)
            scaler.step(optimizer)
            scaler.update()
            if kind == "ema":
                with torch.no_grad():
                    for mine, theirs in zip(ema.parameters(), net.parameters(), strict=True):
                        mine.lerp_(theirs, 0.1)
            elif kind == "scheduler":
                scheduler.step()
            elif kind == "metrics":
                total = torch.tensor(float(len(x)))
                dist.all_reduce(total)
                state.total = total.item()


train(state)
