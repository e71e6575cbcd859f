"""A model of which each worker has a part, given to what takes its parameters to be equal on all workers."""

import sys

import torch
from torch.distributed.fsdp import fully_shard

import farandole as fd

fd.init(default_group=True)
model = torch.nn.Linear(6, 4)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
if sys.argv[1] == "optimizer":
    fd.DistributedOptimizer(optimizer)
else:
    fd.elastic.TorchState(model=model, optimizer=optimizer)
print("NOT REFUSED")
