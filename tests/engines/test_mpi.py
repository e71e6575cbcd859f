"""Jobs under mpirun, of Open MPI and of MPICH: scripts of fixed size, and agents that join an elastic job."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from farandole.testing.proof import Proof
from farandole.testing.running_job import RunningJob, all_training
from tests.engines.contract import LONG_S, check_contract
from tests.support.jobs import ELASTIC_JOB, SCRIPTS, check_job, processes_with

SAMPLES = 600

# Rank 1 is another host only by its name: both run on this machine.
AGENT = 'exec "$0" -m farandole agent --job-file "$1" --host mpi-${OMPI_COMM_WORLD_RANK:-$PMI_RANK}'

OPEN_MPI = ("--oversubscribe", "--bind-to", "none")
# The names of the program, and what it prints as its version: that of Debian beside another mpirun is OpenRTE.
KINDS = {"Open MPI": ("mpirun", "mpirun.openmpi"), "HYDRA": ("mpiexec.hydra", "mpirun")}
VERSIONS = {"Open MPI": ("(Open MPI)", "(OpenRTE)"), "HYDRA": ("HYDRA",)}


@functools.cache
def launcher(kind: str) -> tuple[str, ...]:
    """The beginning of the command line of this kind of mpirun; empty where it is not installed."""
    for program in KINDS[kind]:
        path = shutil.which(program)
        if path is None:
            continue
        version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60).stdout
        if any(text in version for text in VERSIONS[kind]):
            as_root = ("--allow-run-as-root",) if kind == "Open MPI" and os.geteuid() == 0 else ()
            return (path, *as_root, *(OPEN_MPI if kind == "Open MPI" else ()))
    return ()


@pytest.fixture(params=sorted(KINDS))
def mpirun(request: pytest.FixtureRequest) -> tuple[str, ...]:
    command = launcher(request.param)
    if not command:
        pytest.skip(f"there is no mpirun of {request.param}: apt-get install openmpi-bin, pip install mpich")
    return command


@pytest.mark.timeout(240)
def test_a_script_of_fixed_size_runs_under_mpirun(mpirun: tuple[str, ...]) -> None:
    command = [*mpirun, "-np", "2", sys.executable, str(SCRIPTS / "fixed_size_job.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    assert [line.split()[1:5] for line in lines] == [
        ["rank=0", "size=2", "local=0/2", "slot=0"],
        ["rank=1", "size=2", "local=1/2", "slot=1"],
    ]
    assert all("equal=True" in line for line in lines)


@pytest.mark.timeout(240)
def test_agents_under_mpirun_train_an_elastic_job(mpirun: tuple[str, ...], tmp_path: Path) -> None:
    records, file, stop = tmp_path / "records", tmp_path / "job", tmp_path / "stop"
    records.mkdir()
    flags = ["-np", "2", "--local-slots", "0", "--job-file", str(file), "--verbose"]
    words = ["--epochs", "100000", "--stop", str(stop)]
    with RunningJob(flags, ELASTIC_JOB, words, records, tmp_path / "output") as job:
        wait_until(file.exists, "the job file")
        agents = subprocess.Popen([*mpirun, "-np", "2", "sh", "-c", AGENT, sys.executable, str(file)])
        try:
            members = job.wait_until(all_training(2), LONG_S)
            os.kill(members[1]["pid"], signal.SIGKILL)
            job.wait_until(lambda latest: all_training(2)(latest) and latest[0]["generation"] >= 3, LONG_S)
            stop.touch()
            assert job.wait(LONG_S) == 0
            assert agents.wait(LONG_S) == 0
        except BaseException:
            print((tmp_path / "output").read_text())
            raise
        finally:
            if agents.poll() is None:
                agents.terminate()
                agents.wait(LONG_S)
    assert not file.exists()
    check_job(Proof(records), SAMPLES)
    assert processes_with(str(file)) == []


# Each host's agent has an mpirun of its own, since mpirun ends all processes when one was killed. A shell plays the
# scheduler: it waits for the job, and starts the agent again unless the job needs the host no longer.
HOST = """
while [ ! -e "$1" ]; do sleep 0.1; done
until "${@:4}" "$0" -m farandole agent --job-file "$1" --host "$2" --left-exit-code 0 >>"$3" 2>&1
do [ -e "$1" ] || exit 0; done
"""


class MpiHosts:
    """Hosts, by their names, for the contract of engines."""

    program = (sys.executable, "-m", "farandole", "run")
    environment = None

    def __init__(self, folder: Path, mpirun: tuple[str, ...]) -> None:
        self._file, self._output, self._mpirun = folder / "job", folder / "agents", mpirun
        self._hosts: list[subprocess.Popen[bytes]] = []

    def flags(self, hosts: int) -> list[str]:
        for _ in range(hosts):
            self.add_host()
        return ["-np", str(hosts), "--max-np", "9", "--local-slots", "0", "--job-file", str(self._file)]

    def add_host(self) -> None:
        places = [sys.executable, str(self._file), f"mpi-{len(self._hosts)}", str(self._output)]
        command = ["bash", "-c", HOST, *places, *self._mpirun, "-np", "1"]
        self._hosts.append(subprocess.Popen(command, start_new_session=True))

    def kill_worker(self, host: str, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def kill_agent(self, host: str) -> None:
        os.kill(self._agent_of(host), signal.SIGKILL)

    def cut_off(self, host: str) -> bool:
        return False

    def give_notice(self, host: str) -> bool:
        os.kill(self._agent_of(host), signal.SIGTERM)
        return True

    def control_flags(self) -> list[str]:
        return ["--job-file", str(self._file)]

    def leftovers(self) -> list[int]:
        for host in self._hosts:
            host.wait(LONG_S)
        return processes_with(str(self._file))

    def close(self) -> None:
        for host in self._hosts:
            if host.poll() is None:
                os.killpg(host.pid, signal.SIGTERM)
                host.wait(LONG_S)

    def _agent_of(self, host: str) -> int:
        """Return the process id of the agent, not of what has started it, nor of what it has started."""
        words = f"{sys.executable}\0-m\0farandole\0agent\0--job-file\0{self._file}\0--host\0{host}\0"
        (pid,) = [pid for pid in processes_with(words) if Path(f"/proc/{pid}/cmdline").read_text().startswith(words)]
        return pid


@pytest.mark.timeout(240)
def test_agents_under_mpirun_meet_the_contract_of_engines(mpirun: tuple[str, ...], tmp_path: Path) -> None:
    hosts = MpiHosts(tmp_path, mpirun)
    try:
        figures = check_contract(hosts, tmp_path)
    finally:
        hosts.close()
    print(figures)
    assert figures.redone_by_drain == figures.redone_by_notice == 0, figures
    assert figures.agent_killed_ms < 1000, figures


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {LONG_S:g} s: {what}"
        time.sleep(0.05)
