"""A loop with a teacher, which it has outside its TorchState unless the argument is "inside". Slot 1 is killed in
step 5. With "fault", slot 2 is killed in the first loop body after a newcomer has joined, which is its trial."""

from __future__ import annotations

import copy
import os
import signal
import sys
import time

import torch
import torch.nn.functional as F

import farandole as fd

HOW, STEPS_S = sys.argv[1], 0.02
fd.init()
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
teacher = copy.deepcopy(net).requires_grad_(False)
optimizer = fd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
loader = fd.elastic.DataLoader(torch.utils.data.TensorDataset(torch.randn(4800, 4)), 12, seed=0)
tracked = {"teacher": teacher} if HOW == "inside" else {}
state = fd.elastic.TorchState(model=net, optimizer=optimizer, loader=loader, **tracked)


@fd.elastic.run
def train(state: fd.elastic.TorchState) -> None:
    for _epoch in loader.epochs(1):
        for (x,) in loader:
            if state.step == 3:
                teacher.load_state_dict({name: each + 1 for name, each in net.state_dict().items()})
            if state.step == 5 and fd.slot() == 1 and fd.generation() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if HOW == "fault" and fd.slot() == 2 and fd.generation() >= 3:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            (F.mse_loss(net(x), x.sum(1, keepdim=True)) + F.mse_loss(net(x), teacher(x))).backward()
            optimizer.step()
            time.sleep(STEPS_S)


train(state)
