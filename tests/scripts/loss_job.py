"""A job with a loss of the given kind; rank 2 kills itself in its tenth loop body, unless told otherwise."""

from __future__ import annotations

import argparse
import os
import queue
import signal

import torch
import torch.nn.functional as F

import farandole as fd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["mean", "sum", "declared", "classes", "weighed"])
    parser.add_argument("--undisturbed", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    fd.init()
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(240, 6, generator=generator), torch.randint(3, (240,), generator=generator)
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8, momentum=0.0), torch.nn.Linear(8, 3))
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = fd.DistributedOptimizer(inner, loss="sum" if options.kind == "declared" else "mean")
    loader = fd.elastic.DataLoader(data, global_batch_size=24)
    state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)
    weights = torch.tensor([1.0, 3.0, 9.0])
    bodies = queue.SimpleQueue[None]()  # variables are brought back after a rehearsal

    @fd.elastic.run
    def train(state: fd.elastic.TorchState) -> None:
        for _ in loader.epochs(2):
            for x, y in loader:
                bodies.put(None)
                if not options.undisturbed and fd.rank() == 2 and bodies.qsize() == 10:
                    os.kill(os.getpid(), signal.SIGKILL)
                if options.kind in ("sum", "declared"):
                    loss = F.cross_entropy(model(x), y, reduction="sum")
                elif options.kind == "mean":
                    loss = F.cross_entropy(model(x), y)
                else:
                    if options.kind == "weighed":
                        fd.weight(float(weights[y].sum()))
                    loss = F.cross_entropy(model(x), y, weight=weights)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    train(state)
    print(f"BODIES {bodies.qsize()}", flush=True)


if __name__ == "__main__":
    main()
