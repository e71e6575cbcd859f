"""The small model in float64 that the jobs with trainers of others train, its data, and how it is trained without
them: for comparing."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

SAMPLES, GLOBAL_BATCH_SIZE, EPOCHS = 140, 12, 4
STEPS_PER_EPOCH = -(-SAMPLES // GLOBAL_BATCH_SIZE)
MAX_NORM = 0.5  # so small that each step is clipped


def digits(first: int = 0, last: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    """The file of scikit-learn's load_digits(): without importing it, a worker starts a second earlier."""
    package = importlib.util.find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    rows = np.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", delimiter=",", max_rows=last)
    return torch.tensor(rows[first:, :-1] / 16.0), torch.tensor(rows[first:, -1], dtype=torch.int64)


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.Tanh(), torch.nn.Linear(16, 10)).double()


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)


def train_plainly(batches: list[list[int]]) -> torch.nn.Module:
    """One process, and a step for each of these batches of samples."""
    images, labels = digits()
    model = network()
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer)
    for ids in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(images[ids]), labels[ids]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        scheduler.step()
    return model


def wait_for(generation: int, is_at: int, step: int) -> None:
    """Take more and more time while the job is not yet in this generation: what a test waits for has to happen."""
    if is_at < generation:
        time.sleep(0.02 * 1.15**step)
