"""The cost of strict mode: step times of jobs with and without it, in turns, with one, two and four shards for each
worker.

    python -m benchmarks.strict_cost [--rounds 3] [--seconds 6] [--tasks mlp,resnet,gpt] [--batch 1]
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time

WORKERS = 2
MODES = (0, 1, 2, 4)
"""Shards for each worker; 0: not strict."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--tasks", default="mlp,resnet,gpt")
    parser.add_argument("--batch", type=int, default=1, help="the task's samples of a worker are multiplied by this")
    parser.add_argument("--worker", type=int, help="train one task with so many shards for each worker")
    options = parser.parse_args()
    if options.worker is not None:
        train(options.tasks, options.worker, options.seconds, options.batch)
        return
    for task in options.tasks.split(","):
        times_ms: dict[int, list[tuple[float, float]]] = {mode: [] for mode in MODES}
        for _ in range(options.rounds):
            for mode in MODES:
                times_ms[mode].append(measured_ms(task, mode, options.seconds, options.batch))
        for place, what in enumerate(("step", "of the processor")):
            medians = {mode: statistics.median(each[place] for each in times_ms[mode]) for mode in MODES}
            costs = ", ".join(f"{mode}: {medians[mode] / medians[0] - 1:+.1%}" for mode in MODES if mode)
            print(f"{task}, {what}: {medians[0]:.2f} ms; by shards of a worker {costs}; {times_ms}", flush=True)


def measured_ms(task: str, mode: int, seconds: float, batch: int) -> tuple[float, float]:
    """The median step time of a job, and the mean time of the processor that a step takes."""
    strict = ["--shards", str(WORKERS * mode)] if mode else []
    own = [sys.executable, "-m", "benchmarks.strict_cost", "--worker", str(mode), "--tasks", task]
    command = [sys.executable, "-m", "farandole", "run", "-q", "-np", str(WORKERS), *strict, *own]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--seconds", str(seconds), "--batch", str(batch)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"median step ([0-9.]+) ms, ([0-9.]+) ms of the processor", done.stdout)
    assert found is not None, done.stdout + done.stderr
    return float(found[1]), float(found[2])


def train(name: str, mode: int, seconds: float, batch: int) -> None:
    import torch

    import farandole as fd
    from benchmarks.models import TASKS

    fd.init()
    task = TASKS[name]
    torch.manual_seed(0)
    model = task.build()
    optimizer = fd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), fused=True))
    loader = fd.elastic.DataLoader(task.data(), WORKERS * batch * task.batch, seed=0)
    state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)
    times_s: list[float] = []
    began_cpu_s = 0.0

    @fd.elastic.run
    def run(state: fd.elastic.TorchState) -> None:
        nonlocal began_cpu_s
        began_s = last_s = time.perf_counter()
        began_cpu_s = time.process_time()
        for _ in loader.epochs(10**6):
            for x, y in loader:
                optimizer.zero_grad()
                task.loss(model, x, y).backward()
                if optimizer.step():
                    now_s = time.perf_counter()
                    times_s.append(now_s - last_s)
                    last_s = now_s
                    if len(times_s) % 20 == 0 and fd.mean(float(now_s - began_s)) > seconds:
                        return

    run(state)
    if fd.rank() == 0:
        median_s, cpu_s = statistics.median(times_s[len(times_s) // 4 :]), time.process_time() - began_cpu_s
        print(f"median step {1e3 * median_s:.3f} ms, {1e3 * cpu_s / len(times_s):.3f} ms of the processor", flush=True)


if __name__ == "__main__":
    main()
