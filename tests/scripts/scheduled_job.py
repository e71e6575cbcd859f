"""The job of the random schedules: three epochs of fast steps, records of the samples that the tensors really hold."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import farandole as fd
from farandole.testing.quick_start import without_compiler
from farandole.testing.records import Records

SAMPLES, BATCH, SEED, EPOCHS = 1053, 7, 11, 3
STEPS = EPOCHS * -(-SAMPLES // BATCH)
SLOWER_FROM = STEPS - 75
"""From here on each step takes longer than the one before, until the job is told to hurry: what is to happen to it
shall happen before its end."""


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        x = torch.linspace(-1, 1, 4, dtype=torch.float64) * (index / SAMPLES)
        return x, x.sum(dim=0, keepdim=True).sin() + 0.5, index


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hurry", type=Path, required=True, help="full speed once this file exists")
    parser.add_argument("--pace-ms", type=float, default=5.0, help="what each step waits until then")
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--mean-each-step", action="store_true", help="a collective of the user's own")
    parser.add_argument("--records")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    without_compiler()
    fd.init()
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    loader = fd.elastic.DataLoader(Numbers(), BATCH, seed=SEED, num_workers=options.num_workers)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, gamma=0.9)
    state = fd.elastic.TorchState(
        model=model, optimizer=optimizer, loader=loader, scheduler=scheduler, after_step=[scheduler.step], seen=0
    )
    records = Records(options.records)

    def take_time() -> None:
        if not options.hurry.exists():
            time.sleep(options.pace_ms / 1e3 * 2 ** (max(0, state.step - SLOWER_FROM) / 8))

    @fd.elastic.run
    def train(state: fd.elastic.TorchState) -> float:
        for _ in loader.epochs(EPOCHS):
            for x, y, indices in loader:
                take_time()
                records.before_step(state, [] if loader.batch.is_ghost else indices.tolist())
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                if optimizer.step():
                    records.after_step(state)
                    state.seen += 1
                if options.mean_each_step:
                    fd.mean(loss.item())
        return fd.mean(float(state.step))

    result = train(state)
    weights = [weight for parameter in model.parameters() for weight in parameter.flatten().tolist()]
    records.at_end(state, scheduler_last_epoch=scheduler.last_epoch, seen=state.seen, result=result, weights=weights)


if __name__ == "__main__":
    main()
