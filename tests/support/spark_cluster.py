"""A standalone cluster of Spark on this machine: a master, and workers with one core each. Each is a session of its
own, with its executor and what that starts, and stands for a host."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import psutil

START_S = 120.0
_MASTER, _WORKER = "org.apache.spark.deploy.master.Master", "org.apache.spark.deploy.worker.Worker"


class SparkCluster:
    """Use it in a `with`. `environment` is that of programs that use the cluster; SPARK_MASTER is its address."""

    def __init__(self, python_path: str) -> None:
        import pyspark

        self._folder = Path(tempfile.mkdtemp(prefix="fd-spark-", dir="/tmp"))
        self._program = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.address = f"spark://127.0.0.1:{port}"
        self.environment: Mapping[str, str] = {
            **os.environ,
            "PYTHONPATH": python_path,
            "SPARK_MASTER": self.address,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_WORKER_DIR": str(self._folder),
            "TMPDIR": str(self._folder),  # what a killed host leaves goes with the folder
        }
        self._port, self._processes = port, list[subprocess.Popen[bytes]]()

    def __enter__(self) -> SparkCluster:
        try:
            self._start(_MASTER, ["--host", "127.0.0.1", "--port", str(self._port), "--webui-port", "0"], "ALIVE")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes of the cluster."""
        for process in self._processes:
            if process.poll() is None:
                self._kill(process)
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self) -> None:
        """Start a worker with one core."""
        words = ["--cores", "1", "--memory", "600m", "--host", "127.0.0.1", "--webui-port", "0", self.address]
        self._start(_WORKER, words, "Successfully registered with master")

    def kill_host(self, inside: int) -> None:
        """Kill all processes of the host on which the process with this number runs, as when its power fails."""
        ancestors = {each.pid for each in psutil.Process(inside).parents()}
        self._kill(next(each for each in self._processes if each.pid in ancestors))

    def _start(self, name: str, arguments: list[str], sign: str) -> None:
        output = self._folder / f"daemon.{len(self._processes)}"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [self._program, name, *arguments],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)
        deadline_s = time.monotonic() + START_S
        while not re.search(sign, output.read_text(errors="replace")):
            assert process.poll() is None and time.monotonic() < deadline_s, output.read_text(errors="replace")  # noqa: PT018
            time.sleep(0.1)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """Stop the whole tree first, so that no process in it reports the end of another."""
        tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for each in tree:
                try:
                    each.send_signal(number)
                except psutil.NoSuchProcess:
                    continue
