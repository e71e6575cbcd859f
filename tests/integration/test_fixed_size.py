"""The same script alone, under torchrun, and under what mpirun and srun say to their processes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import SCRIPTS, farandole_run

pytestmark = pytest.mark.long

SCRIPT = str(SCRIPTS / "fixed_size_job.py")


def results(output: str) -> list[str]:
    return sorted(re.findall(r"RESULT (.*)", output))


def weights(output: str) -> set[str]:
    return set(re.findall(r"weight=(\S+)", output))


def check_three(output: str) -> None:
    lines = results(output)
    assert len(lines) == 3
    for rank, line in enumerate(lines):
        assert line.startswith(f"rank={rank} size=3 local={rank}/3 slot={rank} ")
        assert "any=(True, False) steps=8 equal=True" in line
    assert len(weights(output)) == 1


def test_alone_there_is_nothing_to_start() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert results(done.stdout)[0].startswith("rank=0 size=1 local=0/1 slot=0 mean=[nan, nan] any=(True, False)")


def test_under_farandole_run() -> None:
    done = farandole_run("-np", "3", sys.executable, SCRIPT, fresh=True)
    assert done.returncode == 0, done.stderr
    check_three(done.stdout)


def test_under_torchrun() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    done = subprocess.run([*torchrun, SCRIPT], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    check_three(done.stdout)


def run_each(environments: list[dict[str, str]]) -> str:
    """One process for each environment, as a launcher starts them; their output."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_", "PMI", "MASTER_"))}
    processes = [
        subprocess.Popen([sys.executable, SCRIPT], env={**clean, **each}, stdout=subprocess.PIPE, text=True)
        for each in environments
    ]
    outputs = [process.communicate(timeout=90)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return "".join(outputs)


def test_under_what_open_mpi_says() -> None:
    job = f"test-{os.getpid()}"
    check_three(
        run_each(
            [
                {
                    "OMPI_COMM_WORLD_RANK": str(rank),
                    "OMPI_COMM_WORLD_SIZE": "3",
                    "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
                    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
                    "PMIX_NAMESPACE": job,
                }
                for rank in range(3)
            ]
        )
    )


def test_under_what_srun_says() -> None:
    check_three(
        run_each(
            [
                {
                    "SLURM_PROCID": str(rank),
                    "SLURM_STEP_NUM_TASKS": "3",
                    "SLURM_LOCALID": str(rank),
                    "SLURM_NODEID": "0",
                    "SLURM_STEP_NUM_NODES": "1",
                    "SLURM_STEP_TASKS_PER_NODE": "3",
                    "SLURM_JOB_ID": str(os.getpid()),
                    "SLURM_STEP_ID": "0",
                }
                for rank in range(3)
            ]
        )
    )


def test_the_trained_model_does_not_depend_on_who_started_it() -> None:
    launched = farandole_run("-np", "3", sys.executable, SCRIPT)
    alone = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=60)
    (one,), (other,) = weights(launched.stdout), weights(alone.stdout)
    assert abs(float(one) - float(other)) < 1e-6


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    script = tmp_path / "short.py"
    script.write_text(
        "import farandole.training.worker.context as w\nw.CONNECT_TIMEOUT_S = 1.0\nimport farandole as fd\nfd.init()\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    said = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": port}
    done = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, **said}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "missing ranks: [1]" in done.stderr
