"""What comparing states costs: of a step, in turns with steps that compare nothing, and of a regroup.

farandole run -np 3 python -m benchmarks.digest_cost --width 1400 --layers 12     # 25 M parameters
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import farandole as fd
from farandole.training.state.state_digest import TURN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=60)
    parser.add_argument("--steps", type=int, default=2 * TURN)
    parser.add_argument("--in-turn", type=int, default=16, help="steps in a row that compare, or do not")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    fd.init()
    widths = [64] + [options.width] * options.layers
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    model = torch.nn.Sequential(*[m for layer in layers for m in (layer, torch.nn.ReLU())])
    model.append(torch.nn.Linear(options.width, 1))
    optimizer: Any = fd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    numbers = torch.randn(options.batch * options.steps, 64, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(numbers, numbers.sum(dim=1, keepdim=True))
    loader = fd.elastic.DataLoader(data, options.batch, seed=0)
    state: Any = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)
    of_due_block, hashing_s = state.digests.of_due_block, list[float]()

    def is_on() -> bool:
        return bool(state.step // options.in_turn % 2)

    def in_turns(step: int) -> int:
        begin_s = time.thread_time()
        value = of_due_block(step) if is_on() else 0
        hashing_s.append(time.thread_time() - begin_s)
        return value

    state.digests.of_due_block = in_turns
    times: dict[bool, list[float]] = {True: [], False: []}
    hashed: list[float] = []

    @fd.elastic.run
    def train(state: Any) -> None:
        for _ in loader.epochs(1):
            before_s = time.perf_counter()
            for x, y in loader:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                was_on = is_on()
                optimizer.step()
                now_s = time.perf_counter()
                if state.step > 20:
                    times[was_on].append(now_s - before_s)
                    if was_on:
                        hashed.append(hashing_s[-1])
                before_s = now_s

    train(state)
    if fd.rank() == 0:
        on, off = (_in_turns(times[key], options.in_turn) for key in (True, False))
        ratio = statistics.mean(hashed) / statistics.median(off)
        count = sum(parameter.numel() for parameter in model.parameters())
        print(f"{count / 1e6:.3f} M parameters, {fd.size()} workers; medians of turns of {options.in_turn} steps")
        print(f"step without {1e3 * statistics.median(off):.3f} ms, with {1e3 * statistics.median(on):.3f} ms")
        print(f"CPU time of hashing {1e6 * statistics.mean(hashed):.1f} us a step, {ratio:.2%} of a step")
        print(f"sample of a regroup: {1e3 * _best(lambda: state.digests.of_sample(state.step, True)):.2f} ms at best")


def _in_turns(times: list[float], steps: int) -> list[float]:
    """The mean of each turn: a hashed block takes all of its time in one step of several."""
    return [statistics.mean(times[at : at + steps]) for at in range(0, len(times) - steps + 1, steps)]


def _best(call: Callable[[], object]) -> float:
    """Seconds of CPU time, the shortest of some."""
    found = []
    for _ in range(30):
        begin_s = time.thread_time()
        call()
        found.append(time.thread_time() - begin_s)
    return min(found)


if __name__ == "__main__":
    main()
