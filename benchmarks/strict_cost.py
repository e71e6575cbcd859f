"""The cost of strict mode: step times of jobs with and without it, in turns, with one, two and four shards for each
worker.

    python -m benchmarks.strict_cost [--rounds 3] [--seconds 6] [--tasks mlp,resnet,gpt] [--batch 1] [--audits]

With --audits: jobs with one and two shards for each worker, whose steps are not audited, or all are. An audit of 1 % of
the shards audits one step in 100, or in 50.
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
    parser.add_argument("--audits", action="store_true", help="measure the audit instead")
    parser.add_argument("--audit", type=float, default=0.0, help="with --worker: fraction of the shards")
    parser.add_argument("--worker", type=int, help="train one task with so many shards for each worker")
    options = parser.parse_args()
    if options.worker is not None:
        train(options.tasks, options.worker, options.seconds, options.batch, options.audit)
        return
    for task in options.tasks.split(",") if options.audits else ():
        measure_audits(task, options.rounds, options.seconds, options.batch)
    for task in options.tasks.split(",") if not options.audits else ():
        times_ms: dict[int, list[tuple[float, float]]] = {mode: [] for mode in MODES}
        for _ in range(options.rounds):
            for mode in MODES:
                times_ms[mode].append(measured_ms(task, mode, options.seconds, options.batch))
        for place, what in enumerate(("step", "of the processor")):
            medians = {mode: statistics.median(each[place] for each in times_ms[mode]) for mode in MODES}
            costs = ", ".join(f"{mode}: {medians[mode] / medians[0] - 1:+.1%}" for mode in MODES if mode)
            print(f"{task}, {what}: {medians[0]:.2f} ms; by shards of a worker {costs}; {times_ms}", flush=True)


def measure_audits(task: str, rounds: int, seconds: float, batch: int) -> None:
    """Print what an audit of 1 % of the shards costs."""
    for mode in (1, 2):
        without, whole = [], []
        for _ in range(rounds):
            without.append(measured_ms(task, mode, seconds, batch))
            whole.append(measured_ms(task, mode, seconds, batch, audit=1 / mode))
        for place, what in enumerate(("step", "of the processor")):
            ms, audited_ms = (statistics.median(each[place] for each in times) for times in (without, whole))
            cost = 0.01 * mode * (audited_ms / ms - 1)
            print(
                f"{task}, {mode} shards, {what}: {ms:.2f} ms, audited {audited_ms:.2f} ms: 1 % costs {cost:.2%}",
                flush=True,
            )


def measured_ms(task: str, mode: int, seconds: float, batch: int, audit: float = 0.0) -> tuple[float, float]:
    """The median step time of a job, and the mean time of the processor that a step takes."""
    strict = ["--shards", str(WORKERS * mode)] if mode else []
    own = [sys.executable, "-m", "benchmarks.strict_cost", "--worker", str(mode), "--tasks", task]
    command = [sys.executable, "-m", "farandole", "run", "-q", "-np", str(WORKERS), *strict, *own]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--seconds", str(seconds), "--batch", str(batch), "--audit", str(audit)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"median step ([0-9.]+) ms, ([0-9.]+) ms of the processor", done.stdout)
    assert found is not None, done.stdout + done.stderr
    return float(found[1]), float(found[2])


def train(name: str, mode: int, seconds: float, batch: int, audit: float) -> None:
    import torch

    import farandole as fd
    from benchmarks.models import TASKS

    fd.init()
    task = TASKS[name]
    torch.manual_seed(0)
    model = task.build()
    optimizer = fd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), fused=True))
    loader = fd.elastic.DataLoader(task.data(), WORKERS * batch * task.batch, seed=0, audit=audit if mode else None)
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
