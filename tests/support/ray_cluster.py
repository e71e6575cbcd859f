"""A Ray cluster of several raylets on this machine, each a node with its own processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from farandole.integrations.horovod import alias_path
from farandole.integrations.ray.ray_engine import name_of
from farandole.job.agent.network_addresses import own_addresses

RAY = Path(sys.executable).with_name("ray")
START_S = 120.0
_ATTEMPTS = 4
_OBJECT_STORE_BYTES = 80_000_000  # the least that Ray accepts is 75 MB
_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_metrics_collection": "0"}
_NODES = """
import json
import ray
ray.init(log_to_driver=False, logging_level="ERROR")
print("NODES", json.dumps([node for node in ray.nodes() if node["Alive"]]))
"""


class RayCluster:
    """A head without CPUs, and nodes with one CPU each. Use it in a `with`."""

    def __init__(self) -> None:
        # Not a folder of pytest: the paths of unix sockets are short. Not 127.0.0.x: workers of Ray hang there.
        self._folder = Path(tempfile.mkdtemp(prefix="fd-ray-", dir="/tmp"))
        self._host = own_addresses()[0]
        with socket.socket() as free:
            free.bind((self._host, 0))
            self._port = free.getsockname()[1]
        self.address = f"{self._host}:{self._port}"
        found_by = {"PYTHONPATH": os.pathsep.join(filter(None, [str(alias_path()), os.environ.get("PYTHONPATH")]))}
        # What a killed node leaves goes with the folder.
        own = {"RAY_ADDRESS": self.address, "TMPDIR": str(self._folder)}
        self.environment: Mapping[str, str] = {**os.environ, **found_by, **_SETTINGS, **own}
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> RayCluster:
        head = ["--head", f"--port={self._port}", "--num-cpus=0", "--include-dashboard=false"]
        try:
            self._start(*head, f"--temp-dir={self._folder}")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all nodes."""
        for process in self._processes:
            if process.poll() is None:
                kill_tree(psutil.Process(process.pid))
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, nodes: int = 1) -> None:
        """Start so many nodes with one CPU, and wait until they run."""
        for _ in range(nodes):
            self._start(f"--address={self.address}", "--num-cpus=1")

    def nodes(self) -> list[dict[str, Any]]:
        """Return the living nodes, also the head."""
        command = [sys.executable, "-c", _NODES]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=START_S)
        assert done.returncode == 0, done.stderr
        # Ray may print news about the cluster before and after it.
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("NODES ")]
        found: list[dict[str, Any]] = json.loads(line.partition(" ")[2])
        return found

    def drain(self, host: str) -> None:
        """Tell the cluster that the node with this host name of a job will be taken away."""
        node_id = next(node["NodeID"] for node in self.nodes() if name_of(node) == host)
        why = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=a test", "--deadline-remaining-seconds=600"]
        command = [str(RAY), "drain-node", f"--address={self.address}", f"--node-id={node_id}", *why]
        subprocess.run(command, env=self.environment, check=True, timeout=START_S, stdout=subprocess.DEVNULL)

    def kill_node(self, inside: int) -> None:
        """Kill all processes of the node on which the process with this number runs, as when its power fails."""
        ancestors = {each.pid for each in psutil.Process(inside).parents()}
        found = next(each for each in self._processes if each.pid in ancestors)
        kill_tree(psutil.Process(found.pid))

    def _start(self, *flags: str) -> None:
        """Start a node and wait until it runs. One after the other, and again: Ray gives up after 30 s, which a busy
        machine can take."""
        for _ in range(_ATTEMPTS):
            output = self._folder / f"node.{len(self._processes)}"
            command = [str(RAY), "start", "--block", f"--node-ip-address={self._host}", "--disable-usage-stats"]
            with output.open("wb") as file:
                process = subprocess.Popen(
                    [*command, f"--object-store-memory={_OBJECT_STORE_BYTES}", *flags],
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._processes.append(process)
            while process.poll() is None:
                if "Ray runtime started" in output.read_text():
                    return
                time.sleep(0.1)
        raise AssertionError(output.read_text())


def kill_tree(process: psutil.Process) -> None:
    """Kill a process and all below it; first all are stopped, so that none of them acts on the end of another."""
    every = [process]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for each in every:
            with contextlib.suppress(psutil.NoSuchProcess):
                every += [child for child in each.children(recursive=True) if child not in every]
                each.send_signal(number)
