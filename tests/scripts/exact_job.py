"""Trains three small models side by side, in float64, in float32, and one with BatchNorm and dropout, and writes down
what came of it: for comparing a disturbed run with an undisturbed one."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import farandole as fd
from farandole.testing.quick_start import without_compiler
from farandole.testing.step_records import Records

SAMPLES, UNSEEN, PIXELS, CLASSES = 210, 1000, 16, 4


class Digits(torch.utils.data.Dataset):
    """Noisy copies of one picture for each class; a new shift each time that one is fetched."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(0, CLASSES, (SAMPLES + UNSEEN,), generator=generator)
        pictures = torch.randn(CLASSES, PIXELS, dtype=torch.float64, generator=generator)
        noise = torch.randn(SAMPLES + UNSEEN, PIXELS, dtype=torch.float64, generator=generator)
        pictures = pictures[labels] + noise
        self.labels, self.pictures = labels[:SAMPLES], pictures[:SAMPLES]
        self.unseen = pictures[SAMPLES:].float(), labels[SAMPLES:]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pictures[index] + 0.1 * torch.randn(PIXELS, dtype=torch.float64), self.labels[index]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--slow-below", type=int, default=0, help="take more and more time below this generation")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--records")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    without_compiler()
    fd.init()

    double = torch.nn.Sequential(torch.nn.Linear(PIXELS, 12), torch.nn.Tanh(), torch.nn.Linear(12, CLASSES)).double()
    single = torch.nn.Sequential(torch.nn.Linear(PIXELS, 12), torch.nn.Tanh(), torch.nn.Linear(12, CLASSES))
    noisy = torch.nn.Sequential(
        torch.nn.Linear(PIXELS, 32),
        torch.nn.BatchNorm1d(32),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(32, CLASSES),
    )
    first = fd.DistributedOptimizer(torch.optim.SGD(double.parameters(), lr=0.02, momentum=0.9))
    second = fd.DistributedOptimizer(torch.optim.SGD(single.parameters(), lr=0.02, momentum=0.9))
    third = fd.DistributedOptimizer(torch.optim.SGD(noisy.parameters(), lr=0.02, momentum=0.9))
    digits = Digits()
    loader = fd.elastic.DataLoader(digits, global_batch_size=25, micro_batch_size=9, min_local_batch=2, seed=3)

    def note_loss() -> None:
        with torch.no_grad():
            state.losses.append(F.cross_entropy(single(digits.pictures.float()), digits.labels).item())

    state = fd.elastic.TorchState(
        model=double,
        optimizer=first,
        loader=loader,
        single=single,
        second=second,
        noisy=noisy,
        third=third,
        losses=[],
        evaluated=[],
        after_step=[note_loss],
    )
    records = Records(options.records)

    @fd.elastic.run
    def train(state: fd.elastic.TorchState) -> None:
        for epoch in loader.epochs(options.epochs):
            for x, y in loader:
                if loader.batch.index == 0:
                    records.before_step(state)
                time.sleep(0.05 * 1.1**state.step if fd.generation() < options.slow_below else 0)
                for model, optimizer in ((double, first), (single, second), (noisy, third)):
                    optimizer.zero_grad()
                    F.cross_entropy(model(x.to(model[0].weight.dtype)), y).backward()
                    was_applied = optimizer.step()
                if was_applied:
                    records.after_step(state)
            fd.mean(state.losses[-1])
            epoch.once(lambda: state.evaluated.append(len(state.losses)))

    train(state)
    noisy.eval()
    pictures, labels = digits.unseen
    accuracy = (noisy(pictures).argmax(dim=1) == labels).double().mean().item()
    if fd.rank() == 0:
        found = {"losses": state.losses, "evaluated": state.evaluated, "accuracy": accuracy}
        torch.save({"double": double.state_dict(), **found}, options.result)


if __name__ == "__main__":
    main()
