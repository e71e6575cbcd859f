"""What stands around a loop body, or happens beside it."""

import logging
import os
import queue
import random
import signal
import subprocess
import sys
import threading

import torch
import torch.nn.functional as F
from problem import BATCH, EPOCHS, Net, Samples

import farandole as fd

kind = sys.argv[1]
fd.init()
model = Net()
optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
loader = fd.elastic.DataLoader(Samples(), BATCH, seed=5)
state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader, losses=0)
lines = queue.Queue()


def write():
    while (line := lines.get()) is not None:
        logging.getLogger("body").debug(line)


def one_step(x, y, index):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x, index), y)
    loss.backward()
    optimizer.step()
    return loss


class Meter:
    def __enter__(self):
        self.depth = 1
        return self

    def __exit__(self, *_):
        self.depth = 0


def handle(number, frame):
    lines.put(f"signal {number}")


@fd.elastic.run
def train(state):
    if kind == "thread":
        threading.Thread(target=write, daemon=True).start()
    elif kind == "signal":
        signal.signal(signal.SIGUSR1, handle)
    for _ in loader.epochs(EPOCHS):
        for x, y, index in loader:
            if kind == "finally":
                try:
                    one_step(x, y, index)
                finally:
                    lines.put("done")
            elif kind == "except-own":
                try:
                    one_step(x, y, index)
                    if index[0] == 7:
                        raise ValueError("a bad sample")
                except ValueError:
                    lines.put("skipped")
            elif kind == "with":
                with Meter(), torch.enable_grad(), torch.autograd.profiler.record_function("step"):
                    one_step(x, y, index)
            elif kind == "thread":
                lines.put(f"loss {one_step(x, y, index).item()}")
            elif kind == "signal":
                os.kill(os.getpid(), signal.SIGUSR1)
                one_step(x, y, index)
            elif kind == "subprocess":
                one_step(x, y, index)
                if state.step % 5 == 0:
                    subprocess.run(["true"], check=True)
            elif kind == "fork":
                if state.step % 5 == 0 and (pid := os.fork()) == 0:
                    os._exit(0)
                elif state.step % 5 == 0:
                    os.waitpid(pid, 0)
                one_step(x, y, index)
            elif kind == "random":
                random.random()
                torch.rand(3)
                one_step(x, y, index)
            elif kind == "closure":
                loss = (lambda: one_step(x, y, index))()
            elif kind == "anomaly":
                with torch.autograd.detect_anomaly(check_nan=False):
                    one_step(x, y, index)
            elif kind == "zero-after":
                F.mse_loss(model(x, index), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            elif kind == "model-zero":
                model.zero_grad()
                F.mse_loss(model(x, index), y).backward()
                optimizer.step()
            elif kind == "generator":
                for loss in (one_step(*batch) for batch in [(x, y, index)]):
                    lines.put(loss.item())


train(state)
