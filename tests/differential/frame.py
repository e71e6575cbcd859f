"""The script that all pieces are put into: a training script of torchrun, as people write them. Nothing in it knows
Farandole, but for `fault()`, which kills the worker of slot 1 (VICTIM) once where FAULT says so."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, fields

_FRAME = '''
import array, copy, hashlib, io, math, os, random, signal, sys, time
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler
from torch.utils.data import TensorDataset

EPOCHS, SAMPLES, BATCH, LR = 3, 48, 4, 0.05
FAULT_AT = [int(each) for each in os.environ.get("FAULT_AT", "0:2").split(":")]  # epoch and batch
torch.set_num_threads(1)


def fault(epoch, it):
    marker = os.environ.get("FAULT")  # a file that is made by the one worker that is killed
    time.sleep(0.2 if marker else 0.0)  # so that its replacement joins before the end
    if marker and os.environ["LOCAL_RANK"] == os.environ.get("VICTIM", "1") and [epoch, it] == FAULT_AT:
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


class Rows(Dataset):
    def __init__(self, samples=SAMPLES):
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(samples, 8, generator=generator)
        self.y = (self.x.sum(1) > 0).long()
        self.epoch = 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


@@TOP

def report(**values):
    """Write what the training has come to: tensors and numbers by name."""
    kept = {}
    for name, value in values.items():
        if isinstance(value, nn.Module):
            kept.update({f"{name}.{key.removeprefix('module.')}": each for key, each in value.state_dict().items()})
        else:
            kept[name] = torch.as_tensor(value)
    path = os.path.join(os.environ["OUT"], f"{os.getpid()}.pt")
    torch.save({name: value.detach().clone() for name, value in kept.items()}, path + ".part")
    os.rename(path + ".part", path)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
@@MODEL
@@DATA
@@BEFORE
    for epoch in range(EPOCHS):
@@EPOCH
        for it, (x, y) in enumerate(@@LOADER):
@@BODY
            fault(epoch, it)
@@AFTER
@@END
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''

_MODEL = """
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
model = DDP(net)
"""
_DATA = """
dataset = Rows()
sampler = DistributedSampler(dataset, seed=1)
loader = DataLoader(dataset, BATCH, sampler=sampler)
"""
_BODY = """
loss = F.cross_entropy(model(x), y)
optimizer.zero_grad()
loss.backward()
optimizer.step()
"""


@dataclass(frozen=True)
class Piece:
    """What a script has in the places of the frame."""

    top: str = ""
    model: str = _MODEL
    data: str = _DATA
    before: str = "optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)"
    epoch: str = "sampler.set_epoch(epoch)"
    loader: str = "loader"
    body: str = _BODY
    after: str = ""
    end: str = "report(model=model)"

    def script(self) -> str:
        depths = {"top": 0, "epoch": 8, "body": 12, "after": 8}
        text = _FRAME.lstrip()
        for field in fields(self):
            depth = " " * (0 if field.name == "loader" else depths.get(field.name, 4))
            code = textwrap.indent(textwrap.dedent(getattr(self, field.name)).strip("\n"), depth)
            text = text.replace(f"@@{field.name.upper()}", code)
        return text
