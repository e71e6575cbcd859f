"""All benchmarks: prints tables, and writes them and a picture into benchmarks/results/. Measures; asserts no time.

python -m benchmarks.run                                             everything, in three quarters of an hour
python -m benchmarks.run --only step-time --models mlp --workers 2 --transports tcp --turns 5
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import farandole
from benchmarks import (
    all_reduce,
    data_order,
    data_parallel,
    host_faults,
    memory,
    patience,
    plot,
    recovery,
    report,
    step_time,
    unchanged_scripts,
)
from benchmarks.jobs import DEFAULT_TRANSPORTS, ROOT, TRANSPORTS
from benchmarks.models import TASKS
from farandole.testing.lab import why_not

RESULTS = Path(__file__).parent / "results"
_ON_A_LAB = ("host-faults", "patience")
MINUTES = {
    "recovery": 8,
    "in-place": 2,
    "restart": 2,
    "host-faults": 4,
    "patience": 2,
    "step-time": 6,
    "small-batches": 3,
    "busy-machine": 9,
    "all-reduce": 2,
    "commit": 3,
    "memory": 1,
    "data-order": 1,
    "data-parallel": 1,
    "alone": 4,
}
"""The parts, and what each takes by default on two cores; `--kills`, `--times`, `--turns` and `--seconds` change it."""

_LARGE = {"width": 707, "layers": 50}  # of the recovery benchmark's model
_ALONE_MODELS = ("mlp", "gpt")  # the one with the shortest steps, and one of many layers
_LONGER = 2.0  # seconds of a job that looks for one or two percent, beside another one's


def main() -> int:
    options = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: the job under way is ended with it
    parts: dict[str, Callable[[], list[dict[str, Any]] | dict[str, Any]]] = {
        "recovery": lambda: recovery_table(options.kills, options.seed),
        "in-place": lambda: unchanged_scripts.recovery_table(options.kills, options.seed),
        "restart": lambda: unchanged_scripts.restart_table(options.times),
        "host-faults": lambda: host_faults.table(options.times, budget_s=0.3),
        "patience": lambda: patience.measure(options.minutes),
        "step-time": lambda: step_time.table(
            options.models, options.workers, options.transports, options.ways, options.turns, options.seconds
        ),
        "small-batches": lambda: step_time.table(
            options.models, [2], ["tcp", "shm"], ["farandole"], options.turns, options.seconds, is_small=True
        ),
        "busy-machine": lambda: step_time.table(
            options.models, [2], ["tcp", "shm"], list(step_time.USES), options.turns, options.seconds, busy=options.busy
        ),
        "all-reduce": lambda: all_reduce.table(options.workers, options.transports, options.turns, options.seconds / 4),
        "commit": lambda: step_time.commit_table(options.transports, options.turns, _LONGER * options.seconds),
        "memory": lambda: memory.table(options.transports),
        "data-order": data_order.measure,
        "data-parallel": lambda: data_parallel.table(options.turns, options.seconds),
        "alone": lambda: step_time.alone_table(_ALONE_MODELS, 4 * options.turns, options.seconds),
    }
    results = _before(options.output)
    results["machine"] = machine()
    print("machine: " + ", ".join(f"{key} {value}" for key, value in results["machine"].items()), flush=True)
    chosen = [name for name in parts if options.only is None or name in options.only]
    print(f"{len(chosen)} parts; by default they take some {sum(MINUTES[name] for name in chosen)} min", flush=True)
    failed = []
    begin_s = time.monotonic()
    for number, name in enumerate(chosen, 1):
        if name in _ON_A_LAB and (reason := why_not()) is not None:
            print(f"\n{name}: not measured, {reason}", flush=True)
            continue
        print(f"\n[{number} of {len(chosen)}] {name}: some {MINUTES[name]} min", end="", flush=True)
        try:
            results[name.replace("-", "_")] = parts[name]()
        except (
            RuntimeError,
            TimeoutError,
        ) as error:  # of a job; the other parts are of use without it
            failed.append(name)
            print(f"({name}: FAILED, {error})", flush=True)
            continue
        results.setdefault("measured", {})[name] = machine()["date"]
        print(f"({name}: done, {(time.monotonic() - begin_s) / 60:.1f} min since the start)", flush=True)
        _write(results, options.output)
    print(f"\nwritten to {options.output}")
    if options.publish and not failed:
        _publish(results, options.output)
    print(f"failed: {', '.join(failed)}" if failed else "all parts were measured")
    return len(failed)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MINUTES, help="these parts; the others stay as they were measured")
    parser.add_argument("--models", nargs="+", choices=TASKS, default=list(TASKS), help="of the step times")
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=step_time.USES,
        default=["farandole"],
        help="how Farandole is used",
    )
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(DEFAULT_TRANSPORTS))
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--busy", type=int, default=2, help="processes beside the workers (busy-machine)")
    parser.add_argument("--turns", type=int, default=15, help="most, in each job")
    parser.add_argument("--seconds", type=float, default=8.0, help="after which no turn of a job begins")
    parser.add_argument(
        "--kills", type=int, default=20, help="in each row of the recovery table; of the large model a third"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the kills")
    parser.add_argument("--times", type=int, default=6, help="that each fault of a host, and each restart, is measured")
    parser.add_argument("--minutes", type=float, default=1.0, help="of the job that nothing happens to (patience)")
    parser.add_argument("--output", type=Path, default=RESULTS / "latest.json", help="the picture goes beside it")
    parser.add_argument("--publish", action="store_true", help="also into results/N-cores.json and docs/")
    return parser.parse_args()


def _before(path: Path) -> dict[str, Any]:
    """What was measured earlier: `--only` measures a part of it anew."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _write(results: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    if results.get("step_time"):
        path.with_suffix(".svg").write_text(plot.picture(results["step_time"], results["machine"]))


def _publish(results: dict[str, Any], path: Path) -> None:
    report.write(results, report.PAGE)
    shutil.copy(path, RESULTS / f"{os.cpu_count()}-cores.json")
    if path.with_suffix(".svg").exists():
        shutil.copy(path.with_suffix(".svg"), ROOT / "docs" / "step-time.svg")


def machine() -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "farandole": farandole.__version__,
    }


def recovery_table(kills: int, seed: int) -> list[dict[str, Any]]:
    print("\nkill -9 of one worker -> next applied step on all survivors; pause of the survivors at a join")
    print(
        f"{'parameters':>10} {'workers':>7} {'loader':>6} {'other':>7} {'step':>7} {'median':>8} {'worst':>8} "
        f"{'join median':>11} {'worst':>8}"
    )
    rows = []
    for label, size, workers, num_workers, other_ms, times in (
        ("0.025 M", {}, 2, 0, 0.0, kills),
        ("0.025 M", {}, 3, 0, 0.0, kills),
        ("0.025 M", {}, 4, 0, 0.0, kills),
        ("0.025 M", {}, 2, 0, 10.0, kills),
        ("0.025 M", {}, 3, 0, 10.0, kills),
        ("0.025 M", {}, 4, 0, 10.0, kills),
        ("0.025 M", {}, 3, 2, 0.0, kills),
        ("25 M", _LARGE, 2, 0, 0.0, -(-kills // 3)),
        ("25 M", _LARGE, 3, 0, 0.0, -(-kills // 3)),
    ):
        measured = recovery.measure(workers, times, seed, num_workers, other_ms=other_ms, **size)
        row = {"parameters": label, **measured}
        rows.append(row)
        print(
            f"{label:>10} {workers:7d} {num_workers:6d} {other_ms:5.0f}ms {row['median_step_ms']:5.1f}ms "
            f"{row['recovery_median_ms']:6.0f}ms {row['recovery_worst_ms']:6.0f}ms "
            f"{row['join_pause_median_ms']:9.0f}ms {row['join_pause_worst_ms']:6.0f}ms",
            flush=True,
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
