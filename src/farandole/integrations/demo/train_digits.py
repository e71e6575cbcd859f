"""Train a small CNN on images of digits, with as many workers as there are: the script of the demo's workers.

python train_digits.py                           one worker
farandole run -np 3 python train_digits.py       three workers, elastic
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F

import farandole as fd
from farandole.integrations.demo.digits import digits
from farandole.testing.step_records import Records


def network() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(32, 64, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(64 * 4 * 4, 128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, 10),
    )


def accuracy(model: torch.nn.Module, test: torch.utils.data.TensorDataset) -> float:
    """Each worker tests a part; the mean weighs the parts by their size."""
    images, labels = (tensor[fd.rank() :: fd.size()] for tensor in test.tensors)
    with torch.no_grad():
        right = (model(images).argmax(dim=1) == labels).double().mean().item()
    return float(fd.mean(right, weight=len(labels)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--global-batch-size", type=int, default=24)
    parser.add_argument("--num-workers", type=int, default=0, help="loader processes of each worker")
    parser.add_argument("--records", help="folder for records of each worker, one before and one after each step")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    fd.init()
    train_set, test_set = digits()
    model = network().to(fd.device())
    optimizer = fd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    loader = fd.elastic.DataLoader(
        train_set, global_batch_size=options.global_batch_size, seed=0, num_workers=options.num_workers
    )
    steps = options.epochs * len(loader)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    state = fd.elastic.TorchState(
        model=model, optimizer=optimizer, loader=loader, scheduler=scheduler, after_step=[scheduler.step]
    )
    records = Records(options.records)

    @fd.elastic.run
    def train(state: fd.elastic.TorchState) -> float:
        for epoch in loader.epochs(options.epochs):
            total, batches = 0.0, 0
            for images, labels in loader:
                records.before_step(state)
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                if optimizer.step():
                    records.after_step(state)
                    total, batches = total + loss.item(), batches + 1
            mean_loss = fd.mean(total / max(batches, 1), weight=batches)
            if fd.rank() == 0 and (epoch + 1) % 5 == 0:
                print(f"epoch {epoch + 1:3d}   loss {mean_loss:.4f}   workers {fd.size()}", flush=True)
        return accuracy(model, test_set)

    result = train(state)
    records.at_end(state, accuracy=result, scheduler_last_epoch=scheduler.last_epoch)
    if fd.rank() == 0:
        print(f"test accuracy {result:.2%} after {state.step} steps", flush=True)


if __name__ == "__main__":
    main()
