"""All benchmarks: prints tables and writes benchmarks/results/latest.json. Measures; asserts no time."""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import farandole
from benchmarks import all_reduce, recovery

SIZES = [4, 4096, 102_400, 1 << 20, 25 << 20]  # bytes
HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="in each row of the recovery table")
    parser.add_argument("--turns", type=int, default=15, help="in each row of the step time table")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=["recovery", "step-time", "all-reduce"])
    parser.add_argument("--output", type=Path, default=HERE / "results" / "latest.json")
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": machine()}
    print("machine: " + ", ".join(f"{key} {value}" for key, value in results["machine"].items()), flush=True)
    if options.only in (None, "recovery"):
        results["recovery"] = recovery_table(options.kills, options.seed)
    if options.only in (None, "step-time"):
        results["step_time"] = step_time_table(options.turns)
    if options.only in (None, "all-reduce"):
        results["all_reduce"] = all_reduce_table(options.turns)
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nwritten to {options.output}")


def machine() -> dict[str, Any]:
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "farandole": farandole.__version__,
    }


def recovery_table(kills: int, seed: int) -> list[dict[str, Any]]:
    print("\nkill -9 of one worker -> next applied step on all survivors; pause of the survivors at a join")
    print(f"{'workers':>7} {'loader':>6} {'step':>7} {'median':>8} {'worst':>8} {'join median':>11} {'worst':>8}")
    rows = []
    for workers, num_workers in ((2, 0), (3, 0), (3, 2)):
        row = recovery.measure(workers, kills, seed, num_workers)
        rows.append(row)
        print(
            f"{workers:7d} {num_workers:6d} {row['median_step_ms']:5.1f}ms {row['recovery_median_ms']:6.0f}ms "
            f"{row['recovery_worst_ms']:6.0f}ms {row['join_pause_median_ms']:9.0f}ms "
            f"{row['join_pause_worst_ms']:6.0f}ms",
            flush=True,
        )
    return rows


def step_time_table(turns: int) -> list[dict[str, Any]]:
    print("\nstep time, one thread each, in turns within one run; ratio: median of farandole / DDP")
    print(f"{'model':>6} {'workers':>7} {'farandole':>10} {'DDP':>10} {'no comm.':>10} {'ratio':>6}")
    rows = []
    for model in ("mlp", "deep"):
        for workers in (2, 4):
            row = {"model": model, "workers": workers, **step_time(model, workers, turns)}
            rows.append(row)
            print(
                f"{model:>6} {workers:7d} {row['farandole ms']:8.1f}ms {row['ddp ms']:8.1f}ms "
                f"{row['no communication ms']:8.1f}ms {row['ratio']:6.2f}",
                flush=True,
            )
    return rows


def all_reduce_table(rounds: int) -> list[dict[str, Any]]:
    print("\none all-reduce, in turns within one run: our TCP ring and torch's Gloo")
    rows = [row for ranks in (2, 4) for row in all_reduce.measure(ranks, SIZES, rounds)]
    all_reduce.print_table(rows)
    return [dict(row) for row in rows]


def step_time(model: str, workers: int, turns: int) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "farandole", "run", "-np", str(workers), "--quiet", sys.executable]
    command += [
        str(HERE / "step_time_worker.py"),
        "--model",
        model,
        "--turns",
        str(turns),
        "--port",
        str(port),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    for line in done.stdout.splitlines():
        if "RESULT " in line:
            return dict(json.loads(line.split("RESULT ", 1)[1]))
    raise RuntimeError(f"the benchmark printed no result:\n{done.stdout}\n{done.stderr}")


if __name__ == "__main__":
    main()
