"""What TLS costs of a step over TCP: two jobs on this machine, one with --tls and one without, which take turns.

python -m benchmarks.encryption_cost                     # 25 M parameters, 2 workers each
python -m benchmarks.encryption_cost --small             # the same with a small batch

A turn is some steps of one job, during which the workers of the other sleep. Ratios are taken pair by pair.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

JOBS = ("plain", "tls")
_WAIT_S = 0.005
_DEADLINE_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deep", help="one of benchmarks.models.TASKS")
    parser.add_argument("--small", action="store_true", help="with the model's small batch")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=8, help="of a turn; the first one does not count")
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        _train(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        _compare(options, Path(folder))


def _compare(options: argparse.Namespace, folder: Path) -> None:
    certificates = folder / "certificates"
    subprocess.run([sys.executable, "-m", "farandole", "certificates", str(certificates)], check=True)
    (folder / "turn").write_text("0")
    jobs = []
    for job in JOBS:
        flags = ["--tls", str(certificates)] if job == "tls" else []
        run = ["run", "-np", str(options.workers), "--transport", "tcp", "--quiet", "--start-timeout", "120", *flags]
        script = ["-m", "benchmarks.encryption_cost", *sys.argv[1:], "--job", job, "--folder", str(folder)]
        jobs.append(subprocess.Popen([sys.executable, "-m", "farandole", *run, sys.executable, *script]))
    assert [job.wait() for job in jobs] == [0, 0], "a job has failed"
    size = "small batch" if options.small else "usual batch"
    print(f"{options.model}, {size}, {options.workers} workers, TCP; {options.pairs} pairs of turns")
    measured = [json.loads((folder / job).read_text()) for job in JOBS]
    for index, what in enumerate(("step time", "CPU time of rank 0")):
        plain, tls = ([turn[index] for turn in job] for job in measured)
        low, middle, high = statistics.quantiles([b / a for a, b in zip(plain, tls, strict=True)], n=4)
        print(
            f"{what:>18}: plain {1e3 * statistics.median(plain):.1f} ms, TLS {1e3 * statistics.median(tls):.1f} ms, "
            f"ratio {middle:.3f} [{low:.3f}, {high:.3f}]"
        )


def _train(options: argparse.Namespace) -> None:
    """Be a worker of one of the two jobs."""
    import torch

    import farandole as fd
    from benchmarks.models import TASKS

    task = TASKS[options.model]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    fd.init()
    model = task.build()
    optimizer: Any = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3, fused=True))
    batch = (task.small if options.small else task.batch) * fd.size()
    loader = fd.elastic.DataLoader(task.data(), batch, seed=0)
    state: Any = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)
    own, medians = JOBS.index(options.job), list[tuple[float, float]]()

    @fd.elastic.run
    def train(state: Any) -> None:
        times: list[tuple[float, float]] = []  # step time and CPU time
        turn = own - 2  # one turn of each job to warm up: buckets are chosen
        for _ in loader.epochs(1_000_000):
            for x, y in loader:
                if len(times) == options.steps:
                    if turn >= 0:
                        step_s, cpu_s = zip(*times[1:], strict=True)
                        medians.append((statistics.median(step_s), statistics.median(cpu_s)))
                    _end_turn(options.folder, turn + 2)
                    times.clear()
                    turn += 2
                if len(medians) == options.pairs:
                    return
                if not times:
                    _wait_for_turn(options.folder, turn + 2)
                began_s, cpu_s = time.perf_counter(), time.process_time()
                optimizer.zero_grad()
                task.loss(model, x, y).backward()
                optimizer.step()
                times.append((time.perf_counter() - began_s, time.process_time() - cpu_s))

    train(state)
    if fd.rank() == 0:
        (options.folder / options.job).write_text(json.dumps(medians))


def _wait_for_turn(folder: Path, turn: int) -> None:
    deadline_s = time.monotonic() + _DEADLINE_S
    while int((folder / "turn").read_text()) < turn:
        if time.monotonic() > deadline_s:
            sys.exit("the other job has not taken its turn")
        time.sleep(_WAIT_S)


def _end_turn(folder: Path, turn: int) -> None:
    beside = folder / f".turn-{os.getpid()}"
    beside.write_text(str(turn + 1))
    beside.replace(folder / "turn")  # each rank writes the same


if __name__ == "__main__":
    main()
