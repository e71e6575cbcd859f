"""The Ray engine, on a cluster of several raylets on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.engines.contract import check_contract
from tests.support.jobs import SCRIPTS, processes_with
from tests.support.ray_cluster import RayCluster

pytest.importorskip("ray", reason="it needs Ray: make test-engines, or pip install 'farandole[ray]'")

pytestmark = [pytest.mark.alone, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with RayCluster() as cluster:
        cluster.add(3)
        yield cluster


class RayHosts:
    """The nodes of the cluster, for the contract of engines."""

    program = (sys.executable, str(SCRIPTS / "ray_run.py"))

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster, self.environment = cluster, cluster.environment

    def flags(self, hosts: int) -> list[str]:
        return ["-np", str(hosts), "--max-np", "9"]

    def add_host(self) -> None:
        self._cluster.add()

    def kill_worker(self, host: str, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def kill_agent(self, host: str) -> None:
        agent_of(host).parent().kill()  # the actor, as `ray.kill` or the raylet kills it

    def cut_off(self, host: str) -> bool:
        self._cluster.kill_node(inside=agent_of(host).pid)
        return True

    def give_notice(self, host: str) -> bool:
        self._cluster.drain(host)
        return True

    def control_flags(self) -> list[str]:
        return []

    def leftovers(self) -> list[int]:
        return left_of_jobs()


def left_of_jobs() -> list[int]:
    """Return the agents and workers that are left."""
    host = f"{os.uname().nodename}-"
    return [*processes_with(f"\0--host\0{host}"), *processes_with(f"HOROVOD_HOSTNAME={host}")]


def agent_of(host: str) -> psutil.Process:
    """Return the process of the agent of this host."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "agent" in words and host in words and "farandole" in words:
            return process
    raise AssertionError(f"{host} has no agent")


FUNCTIONS = """
import os
import time
import ray
address = os.environ["RAY_ADDRESS"]
ray.init(address=address, _node_ip_address=address.rpartition(":")[0], log_to_driver=False, logging_level="ERROR")
import farandole.ray

def place(factor):
    import torch
    import farandole
    farandole.init()
    total = farandole.allreduce(torch.ones(1), op=farandole.Sum).item()
    return farandole.rank() * factor, os.environ["HOROVOD_HOSTNAME"].rpartition("-")[0], total

def fails():
    raise LookupError("nothing here")

print("PLACES", farandole.ray.run(place, (10,)))
try:
    farandole.ray.run(fails, num_proc=1)
except RuntimeError as error:
    print("TRACEBACK", error.traceback.splitlines()[-1])
try:
    farandole.ray.run(fails, cpus_per_worker=7)
except ValueError as error:
    print("ROOM", error)
from horovod.ray import ElasticRayExecutor, RayExecutor
executor = RayExecutor(RayExecutor.create_settings(), num_workers=2)
executor.start(extra_env_vars={"ADDED": "too"})
print("EXECUTOR", executor.run(lambda: os.environ["ADDED"]), executor.execute_single(lambda made: made))
print("REMOTE", ray.get(executor.run_remote(place, [10]))[1][0])
elastic = ElasticRayExecutor(ElasticRayExecutor.create_settings(min_num_proc=2, max_num_proc=3))
elastic.start()
print("ELASTIC", elastic.run(lambda: int(os.environ["HOROVOD_RANK"]))[:2])
deadline_s = time.monotonic() + 60
while ray.available_resources().get("CPU") != 3:  # what was reserved is free again, soon
    assert time.monotonic() < deadline_s, ray.available_resources()
    time.sleep(0.2)
"""


def test_functions_run_on_all_nodes_and_leave_nothing(cluster: RayCluster, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(FUNCTIONS)
    done = subprocess.run(
        [sys.executable, str(program)], env=cluster.environment, capture_output=True, text=True, timeout=300
    )
    host = os.uname().nodename
    assert done.returncode == 0, done.stderr
    assert f"PLACES [(0, '{host}', 3.0), (10, '{host}', 3.0), (20, '{host}', 3.0)]" in done.stdout
    assert "TRACEBACK LookupError: nothing here" in done.stdout
    assert "ROOM no node of the Ray cluster has room for a worker with 7 CPUs and 0 GPUs: " in done.stdout
    assert "EXECUTOR ['too', 'too'] None" in done.stdout
    assert "REMOTE 10" in done.stdout
    assert "ELASTIC [0, 1]" in done.stdout
    assert left_of_jobs() == []


def test_the_ray_engine_meets_the_contract(cluster: RayCluster, tmp_path: Path) -> None:
    """The last of the tests: it kills a node of the cluster."""
    figures = check_contract(RayHosts(cluster), tmp_path)
    print(figures)
    assert figures.redone_by_drain == figures.redone_by_notice == 0, figures
    assert figures.agent_killed_ms < 1000, figures
