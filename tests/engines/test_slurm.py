"""The Slurm engine, on a real cluster of its own: slurmctld, munged, and a slurmd for each node."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.testing.proof import Proof
from tests.engines.contract import HOSTS, LONG_S, check_contract
from tests.support.jobs import ELASTIC_JOB, check_job
from tests.support.slurm_cluster import SlurmCluster, why_not

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.timeout(300),
]

SAMPLES = 600
NODES = 5
PAGE = Path(__file__).parents[2] / "docs" / "slurm.md"

# slurmd has revoked the job's credentials of the earlier run, and refuses new ones of about the same time: the reason
# for the two minutes.
REVOKED_S = 5.0

# sbatch --wait would look only every some seconds.
SUBMIT = """#!/bin/bash
# Submit `farandole run "$@"` as a batch job on NODES nodes, and end as it does.
folder=$(dirname "$0")
job=$(sbatch --parsable --no-kill --nodes=$NODES --output=/dev/null "$folder/batch" "$@") || exit 1
echo "$job" > "$folder/job.new"
mv "$folder/job.new" "$folder/job"
while [ ! -e "$folder/code.$job" ]; do sleep 0.1; done
exit "$(cat "$folder/code.$job")"
"""
BATCH = """#!/bin/bash
"$PYTHON" -m farandole run "$@" >> "$OUTPUT" 2>&1
echo $? > "$FOLDER/code.new"
mv "$FOLDER/code.new" "$FOLDER/code.$SLURM_JOB_ID"
"""


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(NODES, cpus=2) as slurm:
        yield slurm


class SlurmNodes:
    """A batch job on some nodes of the cluster."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self._cut_off: list[str] = []
        self._place = folder / "slurm"
        self._place.mkdir()
        for name, text in (("submit", SUBMIT), ("batch", BATCH)):
            (self._place / name).write_text(text)
            (self._place / name).chmod(0o755)
        self.program = (str(self._place / "submit"),)
        self.environment = {
            **cluster.environment,
            "PYTHON": sys.executable,
            "OUTPUT": str(folder / "output"),
            "FOLDER": str(self._place),
            "HOME": str(folder),
            "NODES": str(HOSTS),
        }

    @property
    def job(self) -> str:
        return (self._place / "job").read_text().strip()

    def flags(self, hosts: int) -> list[str]:
        assert hosts == HOSTS
        return ["--slurm"]

    def add_host(self) -> None:
        self.farandole("slurm", "grow", "1", "--job", self.job, "--", "--exclusive")

    def kill_worker(self, host: str, pid: int) -> None:
        self.cluster.host(node_of(host)).signal(pid)

    def kill_agent(self, host: str) -> None:
        node = self.cluster.host(node_of(host))
        node.signal(self.agent_on(host))

    def cut_off(self, host: str) -> bool:
        self._cut_off.append(node_of(host))
        self.cluster.cut_off(node_of(host))
        return True

    def give_notice(self, host: str) -> bool:
        """Cancel the step, or the job, that runs the agent."""
        if "-" in host:
            self.cluster.run("scancel", host.partition("-")[2])
        else:
            steps = self.cluster.run("squeue", "--noheader", "--steps", "--format=%i|%N")
            (step,) = re.findall(rf"^(\d+\.\d+)\|{host}$", steps, re.MULTILINE)
            self.cluster.run("scancel", "--signal=TERM", step)
        return True

    def control_flags(self) -> list[str]:
        return ["--job-file", str(self.folder / ".farandole" / f"slurm-{self.job}.job")]

    def leftovers(self) -> list[str]:
        self.cluster.wait_until(lambda: self.cluster.run("squeue", "--noheader") == "", "no job is left")
        found = []
        for name in self.cluster.names:
            # An agent that is cut off tries to join again for a minute; its workers have been killed.
            needle = ELASTIC_JOB.name if name in self._cut_off else "farandole"
            found += [each for each in self.cluster.commands_on(name).values() if needle in " ".join(each)]
        return found

    def farandole(self, *words: str) -> str:
        command = [sys.executable, "-m", "farandole", *words]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env=self.environment, cwd=self.folder
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def agent_on(self, host: str) -> int:
        """The number of the agent's process on its node."""
        for pid, command in self.cluster.commands_on(node_of(host)).items():
            if command[0].endswith("python") and "agent" in command:
                return pid
        raise AssertionError(f"{host} has no agent")


def node_of(host: str) -> str:
    return host.partition("-")[0]


def test_the_slurm_engine_meets_the_contract(cluster: SlurmCluster, tmp_path: Path) -> None:
    figures = check_contract(SlurmNodes(cluster, tmp_path), tmp_path)
    print(figures)
    assert figures.redone_by_drain == figures.redone_by_notice == 0, figures
    assert figures.agent_killed_ms < 2000, figures


class BatchFile:
    """The batch script of docs/slurm.md, submitted in a folder with a train.py."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster, self.folder, self.records = cluster, folder, folder / "records"
        self.records.mkdir()
        (script,) = re.findall(r"```sh\n(#!/bin/bash\n.*?)```", PAGE.read_text(), re.DOTALL)
        (folder / "train.sbatch").write_text(script)
        words = ["--epochs", "100000", "--stop", str(folder / "stop"), "--records", str(self.records)]
        (folder / "train.py").write_text(
            f"import runpy, sys\nsys.argv[1:] = {words}\nrunpy.run_path({str(ELASTIC_JOB)!r}, run_name='__main__')\n"
        )
        programs = folder / "bin"
        programs.mkdir()
        for name, command in (("farandole", f"{sys.executable} -m farandole"), ("python", sys.executable)):
            (programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
            (programs / name).chmod(0o755)
        self.environment = {
            **cluster.environment,
            "PATH": f"{programs}:{cluster.environment['PATH']}",
            "HOME": str(folder),
        }
        self.job = ""
        self._waits_since_s: float | None = None

    def submit(self, *flags: str) -> None:
        command = ["sbatch", "--parsable", *flags, "train.sbatch"]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment, cwd=self.folder)
        assert done.returncode == 0, done.stderr
        self.job = done.stdout.strip()

    def said(self) -> str:
        log = self.folder / f"train-{self.job}.log"
        return log.read_text() if log.exists() else ""

    def wait_for(self, text: str, times: int) -> None:
        """Wait until the job has printed this text so often."""
        self.cluster.wait_until(lambda: self.said().count(text) >= times, text, LONG_S)

    def wait_for_steps(self) -> None:
        """Wait until steps have been applied that were not when this was called."""
        before = Proof(self.records).steps() if any(self.records.iterdir()) else 0

        def have_trained() -> bool:
            return any(self.records.iterdir()) and Proof(self.records).steps() > before + 5

        self.cluster.wait_until(have_trained, "steps", LONG_S)

    def begins_again(self) -> bool:
        """Let the job begin that Slurm would hold back for two minutes, and return whether it has."""
        state = self.cluster.run("squeue", "--noheader", "--jobs", self.job, "--format=%T").strip()
        if state != "PENDING":
            self._waits_since_s = None
        elif self._waits_since_s is None:
            self._waits_since_s = time.monotonic()
        elif time.monotonic() - self._waits_since_s > REVOKED_S:
            command = ["scontrol", "update", f"JobId={self.job}", "StartTime=now"]
            # It fails while the earlier run is still being ended.
            subprocess.run(command, capture_output=True, timeout=LONG_S, env=self.environment)
        return state == "RUNNING"


def test_the_batch_file_of_the_page_continues_from_its_checkpoint_after_each_announced_end(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = BatchFile(cluster, tmp_path)
    job.submit("--nodes=2")
    try:
        # Slurm signals the batch script (B:), or all processes of the steps, workers included.
        for times, whom in enumerate((["--batch"], []), start=1):
            job.wait_for("starts with 2 workers", times)
            job.wait_for_steps()
            cluster.run("scancel", "--signal=USR1", *whom, job.job)
            job.wait_for("the Slurm job goes back into the queue", times)
            cluster.wait_until(job.begins_again, "the job begins again", LONG_S)
        job.wait_for("starts with 2 workers", 3)
        job.wait_for_steps()
        (tmp_path / "stop").touch()
        job.wait_for("2 workers finished the training", 1)
    except BaseException:
        print(job.said(), cluster.run("scontrol", "show", "job"), cluster.run("sinfo", "--Node", "--long"))
        raise
    assert "0 workers lost" in job.said()
    assert "was killed by" not in job.said()
    check_job(Proof(job.records), SAMPLES)
    assert list((tmp_path / ".farandole").iterdir()) == []


@pytest.mark.parametrize(
    ("before", "flags", "says"),
    [
        ([], ["--remote-python", "/nowhere/python"], "/nowhere/python cannot be run there"),
        ([], ["--remote-python", "/usr/bin/python3"], "Farandole is not installed for /usr/bin/python3 there"),
        ([], ["-np", "9"], "-np 9 is above the 2 slots of host0:1, host1:1"),
        (["srun", "--overlap"], [], "this command is one of 2 tasks of a Slurm step; run it once, without srun"),
    ],
)
def test_a_job_that_cannot_run_on_these_nodes_ends_at_once_with_the_reason(
    cluster: SlurmCluster, tmp_path: Path, before: list[str], flags: list[str], says: str
) -> None:
    command = [*before, sys.executable, "-m", "farandole", "run", "--slurm", *flags, "true"]
    done = subprocess.run(
        ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1", "--nodelist=host0,host1", *command],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        env={**cluster.environment, "HOME": str(tmp_path)},
    )
    assert says in done.stderr, done.stderr
    assert done.returncode == 2
