"""Machines of unequal speed: what four workers train in a second, one of which is throttled for a while, with and
without balance; and how many steps the balance takes after the throttle begins and ends.

    python -m benchmarks.balance [--modes off,auto,strict] [--quota 40] [--throttled 12] [--steps 40] [--rounds 3]

Every worker computes in a cgroup of its own with a part of a processor (--quota, in percent): all four together need
less than the two processors of a small machine, and other programs take little of it. One of them has --throttled
percent in the middle third of the job. It needs root, and the controller `cpu` (cgroup v1 or v2). Without it, or with
--sleep, workers sleep in each step instead of computing, longer for each sample while throttled.

"Can do" is measured before and after the job, whose machine may become slower or faster: four workers train at the same
time with the same parts of a processor, model, local batch and mode, but each in a job of its own, so that none waits
for another. A worker on an idle machine would do more: they share caches and the memory.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

WORKERS, GLOBAL_BATCH, SHARDS, THROTTLED_RANK = 4, 256, 32, 1
ALONE_S, MEASURED_S = 25.0, 12.0  # of workers that train alone: with their start, and what is measured of it
PERIOD_US = 10_000
_PRODUCTS = 4  # of matrices for each sample, so that a step is long beside the period of a cgroup
SLEEP_S = 0.002  # for each sample, where workers sleep
V1, V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default="off,auto,strict")
    parser.add_argument("--quota", type=float, default=40.0, help="percent of a processor for each worker")
    parser.add_argument("--throttled", type=float, default=12.0, help="percent of a processor for the throttled worker")
    parser.add_argument("--steps", type=int, default=40, help="steps of each third of a job")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sleep", action="store_true", help="workers sleep instead of computing")
    parser.add_argument("--train", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options, Path(options.train))
        return
    options.sleep = options.sleep or not can_throttle()
    print("workers sleep" if options.sleep else f"workers compute in cgroups, periods of {PERIOD_US / 1000:g} ms")
    for number in range(options.rounds):
        for mode in options.modes.split(","):
            before = sums_per_s(options, mode == "strict")
            steps = job(options, mode)
            after = sums_per_s(options, mode == "strict")
            sums = {name: (before[name] + after[name]) / 2 for name in before}
            print(f"{number} {mode:8}{report(steps, sums, options.steps)}", flush=True)


def report(steps: list[dict[str, float]], sums: dict[str, float], third: int) -> str:
    """Describe a job by the records of rank 0 for each step: its time, and the local batches of the throttled rank."""
    ends = [step["s"] for step in steps]
    middle, last = (third + 10, 2 * third), (2 * third + 10, 3 * third)

    def rate(begin: int, end: int) -> float:
        return GLOBAL_BATCH * (end - begin) / (ends[end - 1] - ends[begin - 1])

    counts = [int(step["samples"]) for step in steps]
    least, most = statistics.median(counts[slice(*middle)]), statistics.median(counts[slice(*last)])
    down = next((at - third for at in range(third, 2 * third) if counts[at] <= 1.15 * least), -1)
    up = next((at - 2 * third for at in range(2 * third, 3 * third) if counts[at] >= 0.9 * most), -1)
    even, throttled = rate(10, third), rate(*middle)
    return (
        f"{even:6.0f} samples/s ({even / sums['even']:.1%}); throttled {throttled:6.0f} "
        f"({throttled / sums['throttled']:.1%}); afterwards {rate(*last):6.0f} ({rate(*last) / sums['even']:.1%}); its "
        f"samples {counts[third - 1]} -> {least:g} after {down} steps, -> {most:g} after {up} steps; "
        f"hash {steps[-1]['hash']}"
    )


def sums_per_s(options: argparse.Namespace, is_strict: bool) -> dict[str, float]:
    """Return the samples per second that the workers can do together, with and without the throttle."""
    least = {"even": options.quota, "throttled": options.throttled}
    parts = {name: [options.quota] * (WORKERS - 1) + [part] for name, part in least.items()}
    return {name: sum(alone_per_s(options, is_strict, each)) for name, each in parts.items()}


def alone_per_s(options: argparse.Namespace, is_strict: bool, parts: Sequence[float]) -> list[float]:
    """Return the samples per second of workers that train at the same time, each alone with its part of a processor."""
    if options.sleep:
        return [part / options.quota / SLEEP_S for part in parts]
    until_s = time.perf_counter() + ALONE_S
    with ThreadPoolExecutor(len(parts)) as threads:
        jobs = [threads.submit(job, options, "alone", is_strict, part, until_s) for part in parts]
        ends = [[step["s"] for step in each.result() if step["s"] > until_s - MEASURED_S] for each in jobs]
    late = [each for each in ends if len(each) < 3 or each[0] > until_s - MEASURED_S / 2]
    assert not late, "a worker had not begun when the others were measured"
    return [GLOBAL_BATCH // WORKERS * (len(each) - 1) / (each[-1] - each[0]) for each in ends]


def job(
    options: argparse.Namespace,
    mode: str,
    is_strict: bool | None = None,
    part: float | None = None,
    until_s: float = math.inf,
) -> list[dict[str, float]]:
    """Run a job. Return the record of each step: its end, and the samples of the throttled rank."""
    size = 1 if mode == "alone" else WORKERS
    flags = ["-q", "-np", str(size), "--balance", "off" if mode in ("off", "alone") else "auto"]
    if is_strict or mode == "strict":
        flags += ["--shards", str(SHARDS // WORKERS * size)]
    with tempfile.TemporaryDirectory(prefix="farandole-balance-") as folder:
        own = ["-m", "benchmarks.balance", "--train", folder, "--modes", mode, "--quota", str(part or options.quota)]
        own += ["--throttled", str(options.throttled), "--steps", str(options.steps), "--until", str(until_s)]
        own += ["--sleep"] if options.sleep else []
        command = [sys.executable, "-m", "farandole", "run", *flags, sys.executable, *own]
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(done.stdout + done.stderr)
        by_rank = [json.loads((Path(folder) / f"rank-{rank}").read_text()) for rank in range(size)]
        ends, samples = by_rank[0], by_rank[THROTTLED_RANK if size > 1 else 0]
        return [step | {"samples": other["samples"]} for step, other in zip(ends, samples, strict=True)]


def train(options: argparse.Namespace, folder: Path) -> None:
    """One worker of a job."""
    import torch
    import torch.nn.functional as F

    import farandole as fd
    from farandole.testing.quick_start import without_compiler

    torch.set_num_threads(1)
    without_compiler()
    fd.init()
    torch.manual_seed(0)
    width = 64 if options.sleep else 1024
    model = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 8))
    block = torch.randn(384, 384)
    optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    size, is_alone = fd.size(), options.modes == "alone"
    data = torch.utils.data.TensorDataset(torch.randn(40 * GLOBAL_BATCH, 64), torch.randint(0, 8, (40 * GLOBAL_BATCH,)))
    loader = fd.elastic.DataLoader(data, GLOBAL_BATCH // WORKERS * size, seed=0, tail="drop")
    state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)
    last = math.inf if is_alone else 3 * options.steps
    records: list[dict[str, object]] = []

    def compute(samples: int, is_throttled: bool) -> None:
        """Take time in proportion to the samples, as a larger model would."""
        if options.sleep:
            time.sleep(samples * SLEEP_S * (options.quota / options.throttled if is_throttled else 1.0))
        for _ in range(0 if options.sleep else samples * _PRODUCTS):
            torch.mm(block, block)

    with throttle(None if options.sleep else options.quota) as set_part:
        throttled = False
        samples = 0

        @fd.elastic.run
        def run(state: fd.elastic.TorchState) -> None:
            nonlocal throttled, samples
            for _ in loader.epochs(1000):
                for x, y in loader:
                    is_due = not is_alone and fd.rank() == THROTTLED_RANK
                    is_due = is_due and options.steps <= state.step < 2 * options.steps
                    if is_due != throttled:
                        throttled = is_due
                        set_part(options.throttled if is_due else options.quota)
                    compute(len(x), throttled)
                    samples += len(loader.indices)
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    if optimizer.step():
                        records.append({"s": time.perf_counter(), "samples": samples})
                        samples = 0
                        if state.step >= last or time.perf_counter() >= options.until:
                            return

        run(state)
    records[-1]["hash"] = state.hash()[:12]
    (folder / f"rank-{fd.rank()}").write_text(json.dumps(records))


# Parts of a processor -------------------------------------------------------------------------------------------------


def can_throttle() -> bool:
    return os.geteuid() == 0 and ((V1 / "cpu.cfs_quota_us").exists() or _has_cpu_controller())


def _has_cpu_controller() -> bool:
    file = V2 / "cgroup.subtree_control"
    return file.exists() and "cpu" in file.read_text().split()


@contextmanager
def throttle(percent: float | None) -> Iterator[object]:
    """Run this process with a part of a processor. Yields a function that changes the part."""
    if percent is None:
        yield lambda part: None
        return
    is_v1 = (V1 / "cpu.cfs_quota_us").exists()
    root = V1 if is_v1 else V2
    group = root / f"farandole-balance-{os.getpid()}"
    group.mkdir()

    def set_part(part: float) -> None:
        quota_us = round(part / 100 * PERIOD_US)
        if is_v1:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")

    try:
        weight, most = ("cpu.shares", 262_144) if is_v1 else ("cpu.weight", 10_000)
        (group / weight).write_text(str(most))
        set_part(percent)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield set_part
    finally:
        (root / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


if __name__ == "__main__":
    main()
