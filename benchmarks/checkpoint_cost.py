"""What checkpoints of some size cost the steps: `python benchmarks/checkpoint_cost.py`. Linux, CPU.

One job of two workers. The state has `--mb` MB: parameters and two moments of AdamW. Rank 0's steps are timed while
checkpoints are written every so many steps; what steps beside a checkpoint take longer than the median of the others
is the cost of it, also when the time goes to copying, to the disk, or to the other worker's waiting.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=300.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=30, help="steps")
    parser.add_argument("--folder", type=Path, help="where checkpoints go (default: the temp folder)")
    parser.add_argument("--times", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.times:
        work(options)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        times = Path(name) / "times.json"
        subprocess.run(
            [
                *(sys.executable, "-m", "farandole", "run", "-np", str(options.workers)),
                *("--checkpoint", f"{name}/checkpoints", "--checkpoint-every", f"{options.every}steps"),
                *(sys.executable, __file__, "--mb", str(options.mb), "--steps", str(options.steps)),
                *("--every", str(options.every), "--times", str(times)),
            ],
            check=True,
            timeout=600,
        )
        print(json.dumps(cost(json.loads(times.read_text()), options.every), indent=1))


def cost(step_s: list[float], every: int) -> dict[str, float]:
    """`step_s[k]`: the time of step k. The first checkpoint, which has to get its memory, is told apart."""
    beside = every // 2  # a checkpoint is over long before the next one
    quiet_s = [s for k, s in enumerate(step_s) if k >= beside and k % every >= beside]
    median_s, mean_s = statistics.median(quiet_s), statistics.mean(quiet_s)
    lost_s = [sum(step_s[k : k + beside]) - beside * mean_s for k in range(every, len(step_s) - beside, every)]
    later = statistics.mean(lost_s[1:])
    return {
        "step_ms": 1e3 * median_s,
        "first_checkpoint_costs_ms": 1e3 * lost_s[0],
        "checkpoint_costs_ms": 1e3 * later,
        "worst_checkpoint_costs_ms": 1e3 * max(lost_s[1:]),
        "longest_step_beside_one_ms": 1e3 * max(max(step_s[k : k + beside]) for k in range(every, len(step_s), every)),
        "percent_of_time_at_one_a_minute": 100 * later / 60,
    }


def work(options: argparse.Namespace) -> None:
    """One worker."""
    import torch

    import farandole as fd

    torch.set_num_threads(1)
    fd.init()
    width = int((options.mb * 1e6 / 3 / 4 / 8) ** 0.5)  # eight layers, three numbers for each parameter
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(8)])
    optimizer = fd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), fused=True))
    size = 8 * fd.size()
    data = torch.utils.data.TensorDataset(torch.randn(size * (options.steps + 1), width))
    loader = fd.elastic.DataLoader(data, global_batch_size=size)
    state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)

    @fd.elastic.run
    def train(state: fd.elastic.TorchState) -> list[float]:
        times = []
        for _ in loader.epochs(1):
            for (x,) in loader:
                times.append(time.monotonic())
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        return [b - a for a, b in itertools.pairwise(times)]

    step_s = train(state)
    if fd.rank() == 0:
        Path(options.times).write_text(json.dumps(step_s))


if __name__ == "__main__":
    main()
