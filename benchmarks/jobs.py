"""Starts the jobs of the benchmarks: `farandole run` with a transport, a module of ours as worker, and its result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TRANSPORTS = {"tcp": "TCP", "shm": "shared memory", "hierarchical": "hierarchical", "gloo": "Gloo"}
DEFAULT_TRANSPORTS = ("tcp", "shm", "gloo", "hierarchical")
_TIMEOUT_S = 300.0


def why_not(transport: str) -> str | None:
    """Why jobs cannot run on this transport here; None: they can."""
    if transport == "hierarchical":
        if os.geteuid() != 0:
            return "it takes two network namespaces, and those take root"
        return "its turns with processes beside it are taken on one host; all_reduce.py measures it between two"
    if transport != "tcp" and not _can_choose():
        return "this Farandole has no other transport than TCP"
    return None


def run_worker(module: str, workers: int, transport: str, arguments: Sequence[str]) -> dict[str, Any]:
    """What rank 0 of a job wrote into its `--folder` as result.json. Raises RuntimeError with the job's output."""
    with tempfile.TemporaryDirectory(prefix="farandole-bench-") as folder:
        # A worker that fails is not replaced: the benchmark is to fail.
        flags = ["-np", str(workers), "--min-np", str(workers), "--restarts", "0", "--no-fork-server", "--quiet"]
        flags += ["--transport", transport] if _can_choose() else []
        return run_processes(
            [sys.executable, "-m", "farandole", "run", *flags, sys.executable, "-m", f"benchmarks.{module}"],
            [*arguments, "--folder", folder],
            Path(folder),
        )


def run_processes(command: Sequence[str], arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run a command that writes `folder`/result.json. Raises RuntimeError when it fails."""
    words = [*command, *arguments]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_S, cwd=ROOT)
    result = folder / "result.json"
    if done.returncode != 0 or not result.exists():
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return dict(json.loads(result.read_text()))


def run_plain(module: str, processes: int, arguments: Sequence[str]) -> dict[str, Any]:
    """As run_worker(), without Farandole: each process is told its `--rank` and the `--ranks`."""
    with tempfile.TemporaryDirectory(prefix="farandole-bench-") as folder:
        command = [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--folder", folder]
        started = [
            subprocess.Popen(
                [*command, "--rank", str(rank), "--ranks", str(processes)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ROOT,
            )
            for rank in range(processes)
        ]
        wait_for_all(started, _TIMEOUT_S)
        return dict(json.loads((Path(folder) / "result.json").read_text()))


def wait_for_all(processes: Sequence[subprocess.Popen[str]], timeout_s: float) -> None:
    """Until all have ended well. None is left when this returns or raises RuntimeError."""
    deadline_s = time.monotonic() + timeout_s
    try:
        for rank, process in enumerate(processes):
            said, _ = process.communicate(timeout=max(0.0, deadline_s - time.monotonic()))
            if process.returncode:
                raise RuntimeError(f"rank {rank} ended with {process.returncode}:\n{said}")
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"not done after {timeout_s:g} s") from error
    finally:
        for process in processes:
            process.kill()
            process.wait()


@cache
def _can_choose() -> bool:
    said = subprocess.run([sys.executable, "-m", "farandole", "run", "--help"], capture_output=True, text=True)
    return "--transport" in said.stdout
