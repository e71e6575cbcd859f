"""A job with a loss of the given kind; rank 2 kills itself in its fifteenth loop body of a step, unless told
otherwise."""

from __future__ import annotations

import argparse
import os
import queue
import signal

import torch
import torch.nn.functional as F

import farandole as fd

KINDS = ("mean", "sum", "declared", "classes", "weighed", "centers", "bank", "hidden", "noise", "average", "compiled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--undisturbed", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    fd.init()
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(240, 6, generator=generator), torch.randint(3, (240,), generator=generator), torch.arange(240)
    )
    torch.manual_seed(0)
    layers = (torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8, momentum=0.0), torch.nn.Linear(8, 3))
    model = torch.nn.Sequential(
        *(layers if options.kind in ("mean", "sum") else (layers[0], torch.nn.Tanh(), layers[2]))
    )
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = fd.DistributedOptimizer(inner, loss="sum" if options.kind == "declared" else "mean")
    loader = fd.elastic.DataLoader(data, global_batch_size=24)
    state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)
    weights = torch.tensor([1.0, 3.0, 9.0])
    bodies = queue.SimpleQueue[None]()  # variables are brought back after a rehearsal
    centers, bank, hidden = torch.zeros(3, 3), torch.zeros(240, 3), torch.zeros(3)
    noise = torch.Generator().manual_seed(fd.rank())
    average = torch.optim.swa_utils.AveragedModel(model)

    @fd.elastic.run
    def train(state: fd.elastic.TorchState) -> None:
        nonlocal hidden
        for _ in loader.epochs(2):
            for x, y, index in loader:
                bodies.put(None)
                if options.kind == "compiled" and fd.rank() == 0 and state.step == 5:
                    torch.compile(torch.neg, backend="eager")(x)
                if options.kind == "noise":
                    x = x + 0.1 * torch.randn(x.shape, generator=noise)
                output = model(x)
                if options.kind in ("sum", "declared"):
                    loss = F.cross_entropy(output, y, reduction="sum")
                elif options.kind in ("classes", "weighed"):
                    if options.kind == "weighed":
                        fd.weight(float(weights[y].sum()))
                    loss = F.cross_entropy(output, y, weight=weights)
                else:
                    loss = F.cross_entropy(output, y)
                if options.kind == "centers":
                    loss = loss + (output - centers[y]).square().mean()
                    centers.index_add_(0, y, 0.1 * (output.detach() - centers[y]))
                elif options.kind == "bank":
                    loss = loss + (output - bank[index]).square().mean()
                    bank[index] = output.detach()
                elif options.kind == "hidden":
                    loss = loss + (output - hidden).square().mean()
                    hidden = output.detach().mean(0)
                optimizer.zero_grad()
                loss.backward()
                if not options.undisturbed and (fd.rank(), state.step) == (2, 15):
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
                if options.kind == "average":
                    average.update_parameters(model)

    train(state)
    print(f"BODIES {bodies.qsize()}", flush=True)
    if fd.rank() == 0:
        print(f"AVERAGE {sum(float(each.detach().double().sum()) for each in average.parameters()):.4f}", flush=True)


if __name__ == "__main__":
    main()
