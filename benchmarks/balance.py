"""Machines of unequal speed: what four workers train in a second, one of which is throttled for a while, with and
without balance; and how many steps the balance takes after the throttle begins and ends.

    python -m benchmarks.balance [--modes off,auto,strict] [--quota 40] [--throttled 12] [--steps 12] [--rounds 8]
        [--shards 32]

Every worker computes in a cgroup of its own with a part of a processor (--quota, in percent): all four together need
less than the two processors of a small machine, and other programs take little of it. One of them has --throttled
percent in the second of three phases. It needs root, and the controller `cpu` (cgroup v1 or v2). Without it, or with
--sleep, workers sleep in each step instead of computing, longer for each sample while throttled.

What the workers can do is measured with four more workers, which have the same parts of a processor, model, local batch
and mode, and train at the same time, but each in a job of its own, so that none waits for another. The job and these
four take turns in each round, and a round is compared in itself, since the machine is faster in some minutes than in
others. In the first turn of a phase the job adapts itself: that round does not count.

The hash of strict mode is compared with that of one worker that trains the same steps on its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gate import Gate, host
from benchmarks.jobs import farandole_run, run_processes
from benchmarks.ratios import ratio_of

WORKERS, GLOBAL_BATCH, THROTTLED_RANK = 4, 256, 1
PHASES = ("equal parts", "one throttled", "afterwards")
JOB, QUIET = "job", "quiet"  # the roles of processes; "0" to "3": alone, with the part of a processor of this rank
PERIOD_US = 10_000
_PRODUCTS = 4  # of matrices for each sample, so that a step is long beside the period of a cgroup
_LONGEST_S = 3600.0
SLEEP_S = 0.002  # for each sample, where workers sleep
V1, V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


class Step(NamedTuple):
    """A step of a job: its end, and the samples that the worker with the throttle had in it."""

    end_s: float
    samples: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default="off,auto,strict")
    parser.add_argument("--quota", type=float, default=40.0, help="percent of a processor for each worker")
    parser.add_argument("--throttled", type=float, default=12.0, help="percent of a processor for the throttled worker")
    parser.add_argument(
        "--steps", type=int, default=12, help="steps of the job in a turn, of which the first is not timed"
    )
    parser.add_argument("--turn", type=float, default=6.0, metavar="SECONDS", help="turn of the workers that are alone")
    parser.add_argument("--rounds", type=int, default=8, help="that count in each phase")
    parser.add_argument(
        "--shards", type=int, default=32, help="in strict mode: the more, the finer the parts of the workers"
    )
    parser.add_argument("--sleep", action="store_true", help="workers sleep instead of computing")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--gate", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        train(options)
        return
    options.sleep = options.sleep or not can_throttle()
    print("workers sleep" if options.sleep else f"workers compute in cgroups, periods of {PERIOD_US / 1000:g} ms")
    for mode in options.modes.split(","):
        measure(options, mode)


def measure(options: argparse.Namespace, mode: str) -> None:
    """Print what a job makes of the workers in each phase."""
    store = host("127.0.0.1")
    options.gate = f"127.0.0.1:{store.port}"
    with ThreadPoolExecutor() as threads:
        started = [threads.submit(run, options, mode, role) for role in (JOB, *map(str, range(WORKERS)))]
        job, *alone = [each.result() for each in started]
    before = GLOBAL_BATCH // WORKERS
    for phase in PHASES:
        rounds = list(zip(*(each["turns"][phase] for each in (job, *alone)), strict=True))
        ratios = [
            per_s(mine, GLOBAL_BATCH) / sum(per_s(each, GLOBAL_BATCH // WORKERS) for each in others)
            for mine, *others in rounds[1:]
        ]
        samples = [Step(*step).samples for turn in job["turns"][phase] for step in turn]
        after = statistics.median(samples[options.steps :])
        adapted = next((at for at, count in enumerate(samples) if abs(count - after) <= 0.15 * after), None)
        low, middle, high = ratio_of(ratios)
        rate = statistics.median(per_s(mine, GLOBAL_BATCH) for mine, *_ in rounds[1:])
        print(
            f"{mode:7} {phase:14} {rate:4.0f} samples/s, {middle:6.1%} [{low:.1%}, {high:.1%}] of what the workers can "
            f"do; samples of the one: {before:g} -> {after:g} after {adapted} steps",
            flush=True,
        )
        before = after
    if mode == "strict":
        quiet = run(options, mode, QUIET)["hash"]
        print(f"{mode:7} hash {job['hash']}, of one worker alone: {quiet}", flush=True)


def per_s(turn: Sequence[Sequence[float]], samples: int) -> float:
    """Return the samples per second of a turn, whose steps have so many."""
    steps = [Step(*each) for each in turn]
    return samples * (len(steps) - 1) / (steps[-1].end_s - steps[0].end_s)


def run(options: argparse.Namespace, mode: str, role: str) -> dict[str, Any]:
    """Run the processes of a role. Return the steps of each turn, by phase, and the hash of the state at the end."""
    size = WORKERS if role == JOB else 1
    flags = ["--balance", "auto" if role == JOB and mode != "off" else "off"]
    if mode == "strict":
        flags += ["--shards", str(options.shards // (1 if role in (JOB, QUIET) else WORKERS))]
    own = ["--role", role, "--steps", str(options.steps), "--rounds", str(options.rounds), "--turn", str(options.turn)]
    own += ["--quota", str(options.quota), "--throttled", str(options.throttled), "--gate", options.gate]
    own += ["--sleep"] if options.sleep else []
    command = [*farandole_run(size, "auto", flags), sys.executable, "-m", "benchmarks.balance", *own]
    with tempfile.TemporaryDirectory(prefix="farandole-balance-") as folder:
        return run_processes(command, ["--folder", folder], Path(folder), _LONGEST_S)


# The worker -----------------------------------------------------------------------------------------------------------


def train(options: argparse.Namespace) -> None:
    """Be a worker of a role."""
    import torch
    import torch.nn.functional as F

    import farandole as fd
    from farandole.testing.quick_start import without_compiler

    torch.set_num_threads(1)
    without_compiler()
    fd.init()
    torch.manual_seed(0)
    role = options.role
    rank = fd.rank() if role in (JOB, QUIET) else int(role)
    width = 64 if options.sleep else 1024
    model = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 8))
    block = torch.randn(384, 384)
    optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    data = torch.utils.data.TensorDataset(torch.randn(40 * GLOBAL_BATCH, 64), torch.randint(0, 8, (40 * GLOBAL_BATCH,)))
    batch = GLOBAL_BATCH if role in (JOB, QUIET) else GLOBAL_BATCH // WORKERS
    loader = fd.elastic.DataLoader(data, batch, seed=0, tail="drop")
    state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)
    part = options.quota

    def compute(samples: int) -> None:
        """Take time in proportion to the samples, as a larger model would."""
        if options.sleep:
            time.sleep(samples * SLEEP_S * options.quota / part)
        for _ in range(0 if options.sleep or role == QUIET else samples * _PRODUCTS):
            torch.mm(block, block)

    def step(batches: Iterator[Any]) -> Step:
        samples = 0
        for x, y in batches:
            compute(len(x))
            samples += len(loader.indices)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if optimizer.step():
                break
        return Step(time.perf_counter(), samples)

    def turn(batches: Iterator[Any]) -> list[Step]:
        if role == JOB:
            return [step(batches) for _ in range(options.steps)]
        until_s = time.perf_counter() + options.turn
        steps = [step(batches)]
        while steps[-1].end_s < until_s or len(steps) < 2:
            steps.append(step(batches))
        return steps

    turns: dict[str, list[list[Step]]] = {phase: [] for phase in PHASES}

    def take_turns(batches: Iterator[Any], set_part: Callable[[float], None]) -> None:
        nonlocal part
        gate = Gate(options.gate, 2 * WORKERS)
        for phase in PHASES:
            if rank == THROTTLED_RANK:
                part = options.throttled if phase == "one throttled" else options.quota
                set_part(part)
            gate.wait_for_all()
            for number in range(options.rounds + 1):
                for slot in (JOB, "alone") if number % 2 == 0 else ("alone", JOB):
                    if (slot == JOB) == (role == JOB):
                        turns[phase].append(turn(batches))
                    gate.wait_for_all()

    @fd.elastic.run
    def train_to_the_end(state: fd.elastic.TorchState) -> None:
        batches = ((x, y) for _ in loader.epochs(10**6) for x, y in loader)
        if role == QUIET:
            for _ in range(len(PHASES) * (options.rounds + 1) * options.steps):
                step(batches)
        else:
            with throttle(None if options.sleep else part) as set_part:
                take_turns(batches, set_part)

    train_to_the_end(state)
    if role != JOB or rank == THROTTLED_RANK:
        (options.folder / "result.json").write_text(json.dumps({"turns": turns, "hash": state.hash()[:12]}))


# Parts of a processor -------------------------------------------------------------------------------------------------


def can_throttle() -> bool:
    return os.geteuid() == 0 and ((V1 / "cpu.cfs_quota_us").exists() or _has_cpu_controller())


def _has_cpu_controller() -> bool:
    file = V2 / "cgroup.subtree_control"
    return file.exists() and "cpu" in file.read_text().split()


@contextmanager
def throttle(percent: float | None) -> Iterator[Callable[[float], None]]:
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
