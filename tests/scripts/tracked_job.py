"""Writes the numbers of a small training with a Tracker. Rank 0 is killed at the worst places, and leaves once."""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import farandole as fd
from farandole.testing.quick_start import without_compiler
from farandole.testing.step_records import Records

SAMPLES, GLOBAL_BATCH_SIZE, EPOCHS = 120, 8, 4
STEPS_PER_EPOCH = SAMPLES // GLOBAL_BATCH_SIZE
STEPS = STEPS_PER_EPOCH * EPOCHS


class Faults:
    """Ends rank 0 four times, each time when the others are whole again, but for the last one."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder, self._size = folder, size

    def before_the_log(self, step: int, last: int = 0) -> None:
        """To call when the step is applied, and not logged yet. `last`: the last step, behind which no log() comes."""
        self._end_rank_0("before the log", step == 9, signal.SIGKILL)
        if step > 9 and not self._has_recovered("before the log"):
            self._wait(step)
        if step > 21 and not self._has_recovered("behind the log"):
            self._wait(step)
        self._end_rank_0("leaving", step > 30 and self._has_recovered("behind the log"), signal.SIGTERM)
        self._end_rank_0("in the last step", step == last, signal.SIGKILL)

    def behind_the_log(self, step: int) -> None:
        """To call when the step is logged."""
        self._end_rank_0("behind the log", step > 20 and self._has_recovered("before the log"), signal.SIGKILL)

    def _end_rank_0(self, name: str, is_due: bool, number: int) -> None:
        marker = self._folder / f"ended-{name}"
        if is_due and fd.rank() == 0 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), number)

    def _has_recovered(self, name: str) -> bool:
        """Whether rank 0 was ended there, and all workers were in the job again since. A file tells it to those that
        join when somebody has left already."""
        marker = self._folder / f"recovered-{name}"
        if (self._folder / f"ended-{name}").exists() and fd.size() == self._size:
            marker.touch()
        return marker.exists()

    def _wait(self, step: int) -> None:
        """Take more and more time, so that what is waited for happens before the job is over."""
        time.sleep(0.02 * 1.12**step)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--faults", type=int, default=0, help="the number of workers, where rank 0 is to be ended")
    parser.add_argument("--records")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    without_compiler()
    fd.init()
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    x = torch.linspace(-1, 1, 4 * SAMPLES, dtype=torch.float64).view(SAMPLES, 4)
    y = x.square().sum(dim=1, keepdim=True)
    optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    loader = fd.elastic.DataLoader(torch.utils.data.TensorDataset(x, y), GLOBAL_BATCH_SIZE, seed=3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)
    tracker = fd.elastic.Tracker(options.file)
    state = fd.elastic.TorchState(model, optimizer, loader=loader, scheduler=scheduler, tracker=tracker)
    records = Records(options.records)
    faults = Faults(options.file.parent, options.faults)

    @fd.elastic.run
    def train(state: fd.elastic.StepState) -> None:
        for _ in loader.epochs(EPOCHS):
            for images, labels in loader:
                records.before_step(state)
                optimizer.zero_grad()
                F.mse_loss(model(images), labels).backward()
                if optimizer.step():
                    scheduler.step()
                    records.after_step(state)
                    if options.faults:
                        faults.before_the_log(state.step, STEPS)
                    loss = F.mse_loss(model(x), y).detach()
                    tracker.log(state.step, loss=loss, lr=scheduler.get_last_lr()[0])
                    if options.faults:
                        faults.behind_the_log(state.step)
            weight = next(model.parameters())
            tracker.log(state.step, **{"epoch/weight": weight.norm()})

    train(state)
    records.at_end(state)


if __name__ == "__main__":
    main()
