"""The ssh engine, with a stand-in for the client that runs the command on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.engines.contract import EngineJob, check_contract, hosts_of
from tests.support.jobs import farandole_run, processes_with

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

    def leftovers(self) -> list[str]:
        return processes_with("--host stand-in-")

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
