"""Functions as tasks of a Spark application: two executors of one core each, on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from farandole.integrations.horovod import alias_path
from tests.engines.contract import check_contract
from tests.support.jobs import SCRIPTS, processes_with
from tests.support.spark_cluster import SparkCluster

pytest.importorskip("pyspark", reason="it needs pyspark: make test-engines, or pip install 'farandole[spark]'")

pytestmark = [pytest.mark.alone, pytest.mark.timeout(1200)]

PROGRAM = """
import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

session = (
    SparkSession.builder.master("local-cluster[2,1,512]")
    .config("spark.ui.enabled", "false").config("spark.executor.memory", "512m").getOrCreate()
)
session.sparkContext.setLogLevel("ERROR")
import farandole.spark

def place(factor):
    import torch
    import farandole
    farandole.init()
    total = farandole.allreduce(torch.ones(1), op=farandole.Sum).item()
    return farandole.rank() * factor, os.environ["HOROVOD_HOSTNAME"], total

def fails():
    raise LookupError("nothing here")

def train(folder):
    import os, pathlib, signal
    import torch
    import farandole

    farandole.init()
    state = farandole.elastic.TorchState(model=torch.nn.Linear(2, 1), batch=0)

    @farandole.elastic.run
    def go_on(state):
        while state.batch < 60 or (farandole.size() < 2 and state.batch < 100000):
            killed = pathlib.Path(folder) / "killed"
            if state.batch == 20 and farandole.rank() == 1 and not killed.exists():
                killed.touch()
                os.kill(task_of(os.getpid()), signal.SIGKILL)
            farandole.allreduce(torch.ones(1), name="step")
            state.batch += 1
            state.commit()
        return state.batch

    return go_on(state) >= 60, farandole.size()

def task_of(pid):
    # worker, agent, and the process of the task
    import psutil
    return psutil.Process(pid).parent().ppid()

print("PLACES", farandole.spark.run(place, (10,), num_proc=2))
try:
    farandole.spark.run(fails, num_proc=1)
except RuntimeError as error:
    print("TRACEBACK", error.traceback.splitlines()[-1])
print("ELASTIC", farandole.spark.run_elastic(train, (sys.argv[1],), num_proc=2, min_num_proc=1, max_num_proc=2))
frame = session.range(100).withColumnRenamed("id", "number")
frame.repartition(3).write.parquet(sys.argv[1] + "/rows")
rows = farandole.spark.ParquetRows(sys.argv[1] + "/rows")
print("ROWS", sorted(row["number"] for row in (rows[i] for i in range(len(rows)))) == list(range(100)))
session.stop()
"""


def test_functions_run_in_tasks_and_survive_the_end_of_one(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=1100
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert "PLACES [(0, 'spark-task-" in done.stdout
    assert "TRACEBACK LookupError: nothing here" in done.stdout
    assert "ELASTIC [(True, 2), (True, 2)]" in done.stdout
    assert (tmp_path / "killed").exists()
    assert "ROWS True" in done.stdout
    assert processes_with("\0--host\0spark-task-") == []
    assert processes_with("HOROVOD_HOSTNAME=spark-task-") == []


class SparkTasks:
    """Tasks, each on an executor of its own, for the contract of engines. A task waits until Spark has a core for it,
    and its host has the name of the task."""

    program = (sys.executable, str(SCRIPTS / "spark_run.py"))

    def __init__(self, cluster: SparkCluster) -> None:
        self._cluster, self.environment = cluster, cluster.environment

    def flags(self, hosts: int) -> list[str]:
        for _ in range(hosts):
            self.add_host()
        return ["-np", str(hosts), "--max-np", "9"]

    def add_host(self) -> None:
        self._cluster.add()

    def kill_worker(self, host: str, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def kill_agent(self, host: str) -> None:
        agent_of(host).kill()

    def cut_off(self, host: str) -> bool:
        self._cluster.kill_host(inside=agent_of(host).pid)
        return True

    def give_notice(self, host: str) -> bool:
        agent_of(host).terminate()
        return True

    def control_flags(self) -> list[str]:
        return []

    def leftovers(self) -> list[int]:
        return [*processes_with("\0--host\0spark-task-"), *processes_with("HOROVOD_HOSTNAME=spark-task-")]


def agent_of(host: str) -> psutil.Process:
    """Return the process of the agent of this host."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "agent" in words and host in words and "farandole" in words:
            return process
    raise AssertionError(f"{host} has no agent")


def test_tasks_meet_the_contract_of_engines(tmp_path: Path) -> None:
    found_by = os.pathsep.join(filter(None, [str(alias_path()), os.environ.get("PYTHONPATH")]))
    with SparkCluster(found_by) as cluster:
        figures = check_contract(SparkTasks(cluster), tmp_path)
    print(figures)
    assert figures.redone_by_drain == figures.redone_by_notice == 0, figures
    assert figures.agent_killed_ms < 1000, figures
