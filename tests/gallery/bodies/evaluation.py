"""Evaluations, early stopping, and files that are written on the way."""

import os
import pathlib
import sys
import tempfile

import torch
import torch.nn.functional as F
from problem import BATCH, EPOCHS, Net, Samples

import farandole as fd

kind = sys.argv[1]
fd.init()
model = Net()
optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
loader = fd.elastic.DataLoader(Samples(), BATCH, seed=5)
evaluation = fd.elastic.EvalLoader(Samples(30), 4)
state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader, best=float("inf"), scores={}, saved=0)
folder = pathlib.Path("out")


def evaluate():
    model.eval()
    total = 0.0
    with torch.no_grad():
        for x, y, _ in evaluation:
            total += F.mse_loss(model(x), y, reduction="sum").item()
    model.train()
    return fd.mean(total / max(1, evaluation.samples), weight=evaluation.samples)


@fd.elastic.run
def train(state):
    for epoch in loader.epochs(EPOCHS):
        for x, y, index in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x, index), y)
            loss.backward()
            optimizer.step()
            if kind == "middle" and state.step % 5 == 4:
                state.scores[state.step] = evaluate()
            elif kind == "save-rank-0" and state.step % 3 == 0 and fd.rank() == 0:
                handle, name = tempfile.mkstemp(dir=folder)
                with os.fdopen(handle, "wb") as file:
                    torch.save(model.state_dict(), file)
                os.replace(name, folder / "model.pt")
            elif kind == "save-once" and state.step % 4 == 0:
                state.save_once(lambda path: torch.save(model.state_dict(), path), folder / "once.pt")
                state.saved += 1
            elif kind == "stop" and fd.any(state.step >= 5 + 8 * epoch):
                break
            elif kind == "any" and fd.any(loss.item() > 1e6):
                raise RuntimeError("diverged")
            elif kind == "named":
                fd.allreduce(torch.tensor([loss.item()]), name="loss")
            elif kind == "metrics":
                state.scores["loss"] = fd.mean(loss.item())
        if kind in ("end", "best"):
            score = evaluate()
            if kind == "end":
                state.scores[int(epoch)] = score
            elif score < state.best:
                state.best = score
                state.save_once(lambda path: torch.save(model.state_dict(), path), folder / "best.pt")
        elif kind == "once":
            score = evaluate()
            epoch.once(lambda score=score, epoch=epoch: state.scores.update({f"{int(epoch)}": score}))
        elif kind == "once-mean":
            epoch.once(lambda epoch=epoch: state.scores.update({f"{int(epoch)}": round(fd.mean(1.0), 6)}))
        elif kind == "barrier":
            fd.barrier()
            if fd.rank() == 0:
                torch.save(model.state_dict(), folder / "end.pt")
            fd.barrier()
        elif kind == "gather":
            state.scores[int(epoch)] = sorted({round(each, 9) for each in fd.allgather_object(state.step)})


train(state)
