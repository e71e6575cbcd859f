"""Change one element of one worker's state again and again, and count what is found, how soon, and under which name.

farandole run -np 3 python -m benchmarks.divergence --changes 100
"""

from __future__ import annotations

import argparse
import copy
import json
import random
from typing import Any

import torch
import torch.nn.functional as F

import farandole as fd
from farandole.training.state.state_digest import EVERY, TURN
from farandole.training.state.sync import SyncReport
from farandole.training.worker.state_watch import StateWatch

KINDS = ("weight", "momentum", "buffer", "ema")
LATEST = TURN + EVERY + 1  # steps: a turn, and the boundary after the one where it was hashed


class Seen(list[SyncReport]):
    """What comparisons have found, on this rank; the same on all."""

    def __init__(self) -> None:
        super().__init__()
        synchronized = StateWatch.synchronized

        def see(watch: StateWatch, report: SyncReport) -> None:
            self.append(report)
            synchronized(watch, report)

        StateWatch.synchronized = see  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--changes", type=int, default=100)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    fd.init()
    seen, draw = Seen(), random.Random(options.seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, options.width), torch.nn.ReLU())
    model.extend([torch.nn.Linear(options.width, options.width), torch.nn.Linear(options.width, 1)])
    model.register_buffer("table", torch.ones(1000))
    optimizer: Any = fd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    numbers = torch.randn(6000, 8, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(numbers, numbers.sum(dim=1, keepdim=True))
    loader = fd.elastic.DataLoader(data, 12, seed=0)
    state: Any = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader, ema=copy.deepcopy(model))
    results: list[dict[str, Any]] = []

    def change() -> dict[str, Any]:
        """All ranks draw the same; one of them changes an element of its own."""
        kind, rank, place = draw.choice(KINDS), draw.randrange(fd.size()), draw.random()
        parameters = list(model.parameters())
        target = {
            "weight": draw.choice(parameters),
            "momentum": optimizer.state[draw.choice(parameters)]["exp_avg"],
            "buffer": model.table,
            "ema": draw.choice(list(state.ema.parameters())),
        }[kind].view(-1)
        if fd.rank() == rank:
            target[int(place * len(target))] += 1e-3
        return {"kind": kind, "rank": rank, "step": state.step, "found": None}

    @fd.elastic.run
    def train(state: Any) -> None:
        pause = 20
        for _ in loader.epochs(10_000):
            for x, y in loader:
                if any(report.divergence for report in seen):
                    (found,) = [report.divergence for report in seen if report.divergence]
                    results[-1].update(found=state.step, name=found.name, ranks=list(found.ranks), source=found.source)
                    pause = draw.randrange(1, 2 * EVERY)
                seen.clear()
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                with torch.no_grad():
                    for mine, other in zip(state.ema.parameters(), model.parameters(), strict=True):
                        mine.lerp_(other, 0.001)
                    pause -= 1
                    is_late = bool(results) and state.step - results[-1]["step"] > LATEST
                    if pause == 0 or (is_late and results[-1]["found"] is None):
                        if len(results) == options.changes:
                            return
                        results.append(change())

    train(state)
    if fd.rank() == 0:
        found = [each for each in results if each["found"] is not None]
        steps = sorted(each["found"] - each["step"] for each in found)
        right = [each for each in found if each["ranks"] == [each["rank"]]]
        for each in results:
            print(json.dumps(each))
        print(
            f"{len(found)} of {len(results)} found, {len(right)} with the right rank; after {steps[len(steps) // 2]} "
            f"steps (median), {steps[-1]} at most"
        )


if __name__ == "__main__":
    main()
