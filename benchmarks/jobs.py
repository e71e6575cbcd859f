"""Starts the jobs of the benchmarks: `farandole run` with a transport, a module of ours as worker, and its result."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

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
                    start_new_session=True,
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
    """Run a command that writes `folder`/result.json, and whose processes mention the folder in their command lines.

    Raises RuntimeError when it fails or takes longer. None of its processes is left then.
    """
    words = [*command, *arguments]
    said = folder / "output"  # a file: what is left of a job would keep a pipe open
    with said.open("wb") as output:
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{' '.join(words)} had not ended after {timeout_s:g} s:\n{said.read_text()}") from None
    finally:
        end_all(process, folder)
    if process.returncode != 0 or not (folder / "result.json").exists():
        raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}:\n{said.read_text()}")
    return result_of(folder)


def end_all(process: subprocess.Popen[Any], folder: Path) -> None:
    """Kill a process that leads its group, that group, and every process whose command line mentions the folder.

    torchrun's workers are in sessions of their own: they survive torchrun when it is killed. The path of a temporary
    folder names those of one job.
    """
    end_group(process)
    for other in psutil.process_iter(["cmdline"]):
        if other.pid != os.getpid() and any(str(folder) in word for word in other.info["cmdline"] or ()):
            with contextlib.suppress(psutil.Error):
                other.kill()


def end_group(process: subprocess.Popen[Any]) -> None:
    """Kill a process that still runs, and its group if it leads one."""
    if process.poll() is None:  # afterwards its number may be another one's
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()


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
            end_group(process)


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
