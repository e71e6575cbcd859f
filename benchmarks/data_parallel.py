"""What the threads of DataParallel bring: `python -m benchmarks.data_parallel`. One process, in turns.

one     the plain module, one thread
inside  the plain module, as many threads within each operation of torch
ours    fd.DataParallel with as many threads, each with one within an operation

A step is zero_grad, forward, loss and backward. Ratios are taken turn by turn. Two more are of processor times, and
hold on a busy machine, too: what DataParallel spends by what one thread does; and `bound`, one thread's time by that
of the calling thread or of the others, whichever is longer: what free cores would bring at most.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch

import farandole as fd
from benchmarks.models import TASKS
from benchmarks.step_time import quartiles

SAMPLES = {"resnet": 16, "gpt": 8, "mlp": 128}
Row = dict[str, Any]


def main() -> None:
    print(json.dumps(table(), indent=1))


def table(turns: int = 15, seconds: float = 8.0, threads: int = 2) -> list[Row]:
    """One row for each model, printed as they come."""
    before = torch.get_num_threads()
    print(f"\nDataParallel with {threads} threads: step time of one thread / of each way; higher is faster")
    print(
        f"{'model':>16} {'samples':>7} {'one':>9} {'ours':>15} {'inside':>15} {'processor time':>14} "
        f"{'bound':>5} {'load':>5}"
    )
    try:
        return [_measured(model, samples, turns, seconds, threads) for model, samples in SAMPLES.items()]
    finally:
        torch.set_num_threads(before)


def _measured(model: str, samples: int, turns: int, seconds: float, threads: int) -> Row:
    task = TASKS[model]
    x, y = task.data()[:samples]
    plain = task.build()
    parallel = fd.DataParallel(plain, threads=threads)
    ways: dict[str, Callable[[], None]] = {
        "one": lambda: _step(task, plain, x, y, 1),
        "inside": lambda: _step(task, plain, x, y, threads),
        "ours": lambda: _step(task, parallel, x, y, 1),
    }
    for step in ways.values():
        step()
    wall: dict[str, list[float]] = {way: [] for way in ways}
    processor: dict[str, list[float]] = {way: [] for way in ways}
    calling: list[float] = []
    begin_s = time.perf_counter()
    for turn in range(turns):
        for way, step in ways.items():
            at_s, spent_s, thread_s = time.perf_counter(), time.process_time(), time.thread_time()
            step()
            wall[way].append(1e3 * (time.perf_counter() - at_s))
            processor[way].append(1e3 * (time.process_time() - spent_s))
        calling.append(1e3 * (time.thread_time() - thread_s))  # of the last way, ours
        if time.perf_counter() - begin_s > seconds and turn >= 2:
            break
    longest = [
        max(mine, (all_of - mine) / (threads - 1)) for mine, all_of in zip(calling, processor["ours"], strict=True)
    ]
    row: Row = {
        "model": model,
        "label": task.label,
        "samples": samples,
        "threads": threads,
        "turns": len(wall["one"]),
        "ms": {way: round(quartiles(times, [1.0] * len(times))[1], 2) for way, times in wall.items()},
        "speed": {way: quartiles(wall["one"], wall[way]) for way in ("ours", "inside")},
        "best": max(one / ours for one, ours in zip(wall["one"], wall["ours"], strict=True)),
        "processor": quartiles(processor["ours"], processor["one"]),
        "bound": quartiles(processor["one"], longest),
        "load": os.getloadavg()[0],
    }
    low, middle, high = row["speed"]["ours"]
    inside = row["speed"]["inside"]
    print(
        f"{task.label:>16} {samples:7d} {row['ms']['one']:6.1f} ms {middle:5.2f} ({low:.2f}-{high:.2f}) "
        f"{inside[1]:5.2f} ({inside[0]:.2f}-{inside[2]:.2f}) {row['processor'][1]:14.2f} "
        f"{row['bound'][1]:5.2f} {row['load']:5.1f}",
        flush=True,
    )
    return row


def _step(task: Any, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, threads: int) -> None:
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    model.zero_grad()
    task.loss(model, x, y).backward()


if __name__ == "__main__":
    main()
