"""Starts the jobs of the benchmarks: `farandole run` with a transport, a module of ours as worker, and its result."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[1]
TRANSPORTS = {"tcp": "TCP", "shm": "shared memory", "hierarchical": "hierarchical"}
DEFAULT_TRANSPORTS = ("tcp", "shm", "hierarchical")
TIMEOUT_S = 300.0


class OneHost:
    """This machine, as a place for jobs; to be used in a `with`, as two_hosts.TwoHosts. `address`: where all processes
    of a job reach each other."""

    address = "127.0.0.1"

    def __enter__(self) -> OneHost:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def run_worker(self, module: str, workers: int, transport: str, arguments: Sequence[str]) -> dict[str, Any]:
        """What rank 0 of a job wrote into its `--folder` as result.json. Raises RuntimeError with the job's output."""
        return run_worker(module, workers, transport, arguments)

    def run_plain(self, module: str, processes: int, arguments: Sequence[str]) -> dict[str, Any]:
        """The same without Farandole: each process is told its `--rank` and the `--ranks`."""
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
            wait_for_all(started, TIMEOUT_S)
            return result_of(Path(folder))


def run_worker(module: str, workers: int, transport: str, arguments: Sequence[str]) -> dict[str, Any]:
    """OneHost's, on this machine."""
    with tempfile.TemporaryDirectory(prefix="farandole-bench-") as folder:
        return run_processes(
            [*farandole_run(workers, transport), sys.executable, "-m", f"benchmarks.{module}"],
            [*arguments, "--folder", folder],
            Path(folder),
        )


def farandole_run(workers: int, transport: str, flags: Sequence[str] = ()) -> list[str]:
    """The command, up to that of the workers. One that fails is not replaced: the benchmark is to fail."""
    words = ["-np", str(workers), "--min-np", str(workers), "--restarts", "0", "--no-fork-server", "--quiet"]
    return [sys.executable, "-m", "farandole", "run", *words, "--transport", transport, *flags]


def run_processes(
    command: Sequence[str], arguments: Sequence[str], folder: Path, timeout_s: float = TIMEOUT_S
) -> dict[str, Any]:
    """Run a command that writes `folder`/result.json. Raises RuntimeError when it fails."""
    words = [*command, *arguments]
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT)
    result = folder / "result.json"
    if done.returncode != 0 or not result.exists():
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return dict(json.loads(result.read_text()))


def wait_for_all(processes: Sequence[subprocess.Popen[Any]], timeout_s: float) -> None:
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


def result_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "result.json").read_text()))


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Have this number of processes that take all the processor time they can get."""
    code = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**6))"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
