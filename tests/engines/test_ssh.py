"""The ssh engine, with a stand-in for the client that runs the command on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from farandole.base.membership import Address
from tests.engines.contract import EngineJob, check_contract, hosts_of
from tests.support.jobs import farandole, farandole_run, processes_with

CLIENT = """#!/bin/sh
# Like ssh, it ends as the command does; the command is the last of its arguments.
for host_or_command in "$@"; do previous=$command; command=$host_or_command; done
case $previous in
    refused*) echo "$previous: Permission denied (publickey)." >&2; exit 255 ;;
    unknown*) echo "ssh: Could not resolve hostname $previous: Name or service not known" >&2; exit 255 ;;
esac
exec sh -c "$command"
"""


class StandInHosts:
    """Hosts whose names are not those of this machine, so that their agents are started by the stand-in."""

    program = (sys.executable, "-m", "farandole", "run")

    def __init__(self, folder: Path) -> None:
        self.folder, self.hosts_file = folder, folder / "hosts"
        client = folder / "bin" / "ssh"
        client.parent.mkdir()
        client.write_text(CLIENT)
        client.chmod(0o755)
        self.environment = {**os.environ, "PATH": f"{client.parent}:{os.environ['PATH']}"}
        self._count = 0

    def flags(self, hosts: int) -> list[str]:
        for _ in range(hosts):
            self.add_host()
        return ["-np", str(hosts), "--max-np", "9", "--host-discovery-script", f"cat {self.hosts_file}"]

    def add_host(self) -> None:
        with self.hosts_file.open("a") as file:
            file.write(f"stand-in-{self._count}:1\n")
        self._count += 1

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
        return []

    def leftovers(self) -> list[int]:
        return [*processes_with("\0--host\0stand-in-"), *processes_with("HOROVOD_HOSTNAME=stand-in-")]

    def _agent_of(self, host: str) -> int:
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if b"agent" in words and host.encode() in words:
                    return int(entry.name)
        raise AssertionError(f"{host} has no agent")


@pytest.mark.timeout(240)
def test_the_ssh_engine_meets_the_contract(tmp_path: Path) -> None:
    figures = check_contract(StandInHosts(tmp_path), tmp_path)
    assert figures.redone_by_drain == figures.redone_by_notice == 0, figures
    assert figures.agent_killed_ms < 1000, figures


class OperatorsHosts(StandInHosts):
    """Pods of an operator for MPI on Kubernetes, which mounts a script that names those that run."""

    def __init__(self, folder: Path, lines: tuple[str, ...]) -> None:
        super().__init__(folder)
        self._script = folder / "discover_hosts.sh"
        self._script.write_text("\n".join(("#!/bin/sh", *lines, "")))
        self._script.chmod(0o555)

    def flags(self, hosts: int) -> list[str]:
        return ["-np", str(hosts), "--host-discovery-script", str(self._script)]


@pytest.mark.parametrize(
    "lines",
    [
        # mpi-operator (updateDiscoverHostsInConfigMap() in its pkg/controller): names in DNS, no slots.
        ("echo train-worker-0.train.default.svc", "echo train-worker-1.train.default.svc"),
        ("echo train-worker-0:1", "echo train-worker-1:1"),  # et-operator
    ],
)
def test_the_discovery_script_of_an_operator_on_kubernetes_names_the_hosts(
    tmp_path: Path, lines: tuple[str, ...]
) -> None:
    with EngineJob(OperatorsHosts(tmp_path, lines), tmp_path, hosts=2) as job:
        job.train_with(2)
        assert [host.partition(".")[0] for host in hosts_of(job)] == ["train-worker-0", "train-worker-1"]
        assert job.stop() == 0
    assert processes_with("--host train-worker-") == []


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("refused", "host refused: ssh: refused: Permission denied (publickey).; `ssh refused true` must work"),
        ("unknown", "host unknown: ssh: ssh: Could not resolve hostname unknown"),
    ],
)
def test_a_host_that_cannot_be_used_ends_the_job_at_once_with_the_reason(
    tmp_path: Path, host: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", StandInHosts(tmp_path).environment["PATH"])
    done = farandole_run("-np", "2", "-H", f"localhost:1,{host}:1", "true", fresh=True)
    assert (done.returncode, reason in done.stderr) == (2, True), done.stderr


def test_what_a_client_of_ssh_prints_is_among_the_events_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("PATH", StandInHosts(tmp_path).environment["PATH"])
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    script = "echo localhost:1; echo refused:1"
    command = [*StandInHosts.program, "-q", "-np", "1", "--host-discovery-script", script, "sleep", "60"]
    with subprocess.Popen(command) as job:
        try:
            deadline_s = time.monotonic() + 60
            told: list[str] = []
            while not any("Permission denied (publickey)" in line and "AgentPrinted" in line for line in told):
                assert time.monotonic() < deadline_s, told
                told = farandole("events", "--json").stdout.splitlines()
        finally:
            job.send_signal(signal.SIGINT)
        assert job.wait(60) == 130


@pytest.mark.parametrize(
    ("python", "reason"),
    [
        ("/nowhere/python", "/nowhere/python cannot be run there"),
        ("/usr/bin/python3 -S", "give --remote-python PATH"),
    ],
)
def test_a_host_without_python_or_farandole_is_told(
    tmp_path: Path, python: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", StandInHosts(tmp_path).environment["PATH"])
    done = farandole_run("-np", "1", "-H", "far:1", "--remote-python", python, "true", fresh=True)
    assert (done.returncode, reason in done.stderr) == (2, True), done.stderr


# farandole.run() ------------------------------------------------------------------------------------------------------

APART = """#!/bin/sh
# A host without the folder of the caller: what lies there must have travelled.
for command in "$@"; do :; done
exec unshare --mount sh -c 'mount -t tmpfs none "$1" && cd / && exec sh -c "$2"' sh "$CALLERS_FOLDER" "$command"
"""

PROGRAM = """
import os
import farandole as fd

def work(data, fails_on):
    import farandole
    farandole.init()
    if farandole.rank() == fails_on:
        raise LookupError(f"nothing on rank {fails_on} of {os.environ['HOROVOD_HOSTNAME']}")
    total = farandole.allreduce(__import__("torch").ones(1), op=farandole.Sum).item()
    return farandole.rank(), os.environ["HOROVOD_HOSTNAME"], os.listdir(CALLER), data[::-1], total

CALLER, DATA = os.environ["CALLERS_FOLDER"], os.urandom(3_000_000)
WHERE = dict(num_proc=3, hosts="far-0:2,far-1:1")
results = fd.run(work, (DATA, None), **WHERE)
assert all(data == DATA[::-1] and total == 3 for *_, data, total in results)
print("PLACES", [each[:3] for each in results])
try:
    fd.run(work, (DATA, 2), **WHERE)
except fd.FatalError as error:
    print("TRACEBACK", error.traceback.splitlines()[-1])
print("LEFT", [name for name in os.listdir("tmp")])
"""


def test_the_doctor_looks_at_hosts_before_a_job_runs_there(tmp_path: Path) -> None:
    stand_ins = StandInHosts(tmp_path)
    command = [sys.executable, "-m", "farandole", "doctor", "--json", "-H", "stand-in-0:1,refused-1:1"]
    done = subprocess.run(command, env=stand_ins.environment, capture_output=True, text=True, timeout=100)
    here, first, second = json.loads(done.stdout)
    assert done.returncode == 1, done.stdout
    assert {each["state"] for each in here["findings"]} <= {"ok", "warning"}
    found = {each["topic"]: (each["state"], each["text"]) for each in first["findings"]}
    assert found["versions"][0] == "ok"
    assert found["versions"][1].startswith("the same as here: Farandole ")
    assert found["network"] == ("ok", f"it reaches this machine at {', '.join(map(address_text, first['reached']))}")
    assert [(each["state"], each["text"]) for each in second["findings"]] == [
        ("error", "refused-1: Permission denied (publickey).")
    ]


def address_text(address: list[object]) -> str:
    return str(Address(*address))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can hide the caller's folder from the other hosts")
def test_a_function_and_its_results_travel_to_hosts_that_share_no_folder(tmp_path: Path) -> None:
    hosts = StandInHosts(tmp_path)
    (tmp_path / "bin" / "ssh").write_text(APART)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**hosts.environment, "TMPDIR": str(tmp_path / "tmp"), "CALLERS_FOLDER": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "PLACES [(0, 'far-0', []), (1, 'far-0', []), (2, 'far-1', [])]" in done.stdout
    assert "TRACEBACK LookupError: nothing on rank 2 of far-1" in done.stdout
    assert "LEFT []" in done.stdout
    assert processes_with("\0--host\0far-") == processes_with("HOROVOD_HOSTNAME=far-") == []
