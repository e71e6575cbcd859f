"""Two hosts on one machine (farandole.testing.lab), with half of the workers on each: a place for jobs, as OneHost in
jobs.py. It takes root.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.jobs import TIMEOUT_S, farandole_run, result_of, wait_for_all
from farandole.testing.lab import Host, Lab, why_not

__all__ = ["FEWEST", "TwoHosts", "why_not"]

FEWEST = 3
"""Workers: with one on each host there is no hierarchy."""

_JOIN_S = 20.0


class TwoHosts:
    """To be used in a `with`. `address`: of the machine itself, where both hosts reach it."""

    def __enter__(self) -> TwoHosts:
        self._all = contextlib.ExitStack()
        self._lab = self._all.enter_context(Lab(hosts=2))
        self.address = self._lab.network.driver.address
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._all.close()

    def run_worker(self, module: str, workers: int, transport: str, arguments: Sequence[str]) -> dict[str, Any]:
        """As OneHost's: a job whose agents, one on each host, join it."""
        with tempfile.TemporaryDirectory(prefix="farandole-bench-") as name:
            folder, token = Path(name), Path(name) / "token"
            with socket.create_server((self.address, 0)) as server:
                address = f"{self.address}:{server.getsockname()[1]}"
            host, port = address.split(":")
            flags = ["--host", host, "--port", port, "--token-file", str(token), "--local-slots", "0"]
            words = [*farandole_run(workers, transport, flags), sys.executable, "-m", f"benchmarks.{module}"]
            job = subprocess.Popen(
                [*words, *arguments, "--folder", name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            agents = []
            try:
                _wait_for(token)
                for each, slots in zip(self._lab.hosts, _halves(workers), strict=True):
                    joining = ["--join", address, "--slots", str(slots), "--host", each.name]
                    agent = [
                        sys.executable,
                        "-m",
                        "farandole",
                        "agent",
                        *joining,
                        "--token-file",
                        str(token),
                        "--quiet",
                    ]
                    agents.append(each.start(agent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
                wait_for_all([job], TIMEOUT_S)
            finally:
                job.kill()
                job.wait()
                for agent in agents:
                    agent.wait(_JOIN_S)
            return result_of(folder)

    def run_plain(self, module: str, processes: int, arguments: Sequence[str]) -> dict[str, Any]:
        """As OneHost's."""
        with tempfile.TemporaryDirectory(prefix="farandole-bench-") as name:
            command = [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--folder", name]
            first, second = _halves(processes)
            places = [self._lab.hosts[0]] * first + [self._lab.hosts[1]] * second
            started = [
                _start(host, [*command, "--rank", str(rank), "--ranks", str(processes)], Path(name) / f"output{rank}")
                for rank, host in enumerate(places)
            ]
            wait_for_all(started, TIMEOUT_S)
            return result_of(Path(name))


def _start(host: Host, command: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
    with output.open("wb") as sink:
        return host.start(command, stdout=sink, stderr=subprocess.STDOUT)


def _halves(workers: int) -> tuple[int, int]:
    """The larger half on the first host."""
    return workers - workers // 2, workers // 2


def _wait_for(path: Path) -> None:
    deadline_s = time.monotonic() + _JOIN_S
    while not os.path.exists(path):
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{path} did not come")
        time.sleep(0.01)
