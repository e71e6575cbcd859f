"""The ssh engine with the system's client and real servers, on hosts with networks and processes of their own."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.testing.lab import Lab
from farandole.testing.lab.host import Host
from farandole.testing.lab.lab import why_not
from tests.engines.contract import HOSTS, LONG_S, EngineJob, check_contract

SERVER = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
REASON = why_not() or ("" if SERVER else "there is no ssh server here: apt-get install openssh-server")
pytestmark = [pytest.mark.alone, pytest.mark.skipif(bool(REASON), reason=REASON)]

# The key of the server and of the user are the same one; the names of the hosts are their addresses. What an agent
# leaves on a host without power goes with the folder of that host.
SERVER_CONFIG = """
HostKey {key}
AuthorizedKeysFile {key}.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
PermitRootLogin prohibit-password
SetEnv TMPDIR={temporary}
"""
CLIENT_CONFIG = """
Host *
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
    User {user}
    IdentityFile {key}
    IdentitiesOnly yes
"""


class SshHosts:
    """Hosts of a lab, each with a server. The first ones are used at the start."""

    program = (sys.executable, "-m", "farandole", "run")

    def __init__(self, lab: Lab, folder: Path) -> None:
        assert SERVER is not None
        self.lab, self.hosts_file, self._used = lab, folder / "hosts", 0
        key, client = folder / "key", folder / "bin" / "ssh"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        (folder / "client").write_text(CLIENT_CONFIG.format(key=key, user=getpass.getuser()))
        client.parent.mkdir()
        client.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder / "client"} "$@"\n')
        client.chmod(0o755)
        self.environment = {**os.environ, "PATH": f"{client.parent}:{os.environ['PATH']}"}
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd(8), FILES
        for host in lab.hosts:
            config = folder / f"server-{host.name}"
            config.write_text(SERVER_CONFIG.format(key=key, temporary=host.folder))
            host.start([SERVER, "-D", "-f", str(config)], stderr=subprocess.DEVNULL)

    def flags(self, hosts: int) -> list[str]:
        for _ in range(hosts):
            self.add_host()
        script = ["--host-discovery-script", f"cat {self.hosts_file}"]
        return ["-np", str(hosts), "--max-np", "9", "--detection-budget", "1", *script]

    def add_host(self) -> None:
        with self.hosts_file.open("a") as file:
            file.write(f"{self.lab.hosts[self._used].address}:1\n")
        self._used += 1

    def kill_worker(self, host: str, pid: int) -> None:
        self.at(host).signal(pid)

    def kill_agent(self, host: str) -> None:
        self.at(host).signal(self._agent_of(host))

    def cut_off(self, host: str) -> bool:
        self.at(host).power_off()
        return True

    def give_notice(self, host: str) -> bool:
        self.at(host).signal(self._agent_of(host), signal.SIGTERM)
        return True

    def control_flags(self) -> list[str]:
        return []

    def leftovers(self) -> list[str]:
        return [f"{each}: {pid}" for each in self.lab.hosts for pid in agents_on(each)]

    def at(self, address: str) -> Host:
        return next(host for host in self.lab.hosts if host.address == address)

    def _agent_of(self, address: str) -> int:
        (agent,) = agents_on(self.at(address))
        return agent


def agents_on(host: Host) -> list[int]:
    return [pid for pid, words in host.commands().items() if words[1:4] == ["-m", "farandole", "agent"]]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[SshHosts]:
    with Lab(hosts=HOSTS + 1) as lab:
        yield SshHosts(lab, tmp_path)


@pytest.mark.timeout(300)
def test_ssh_hosts_meet_the_contract(hosts: SshHosts, tmp_path: Path) -> None:
    figures = check_contract(hosts, tmp_path)
    print(figures)
    assert figures.redone_by_drain == figures.redone_by_notice == 0, figures
    assert figures.agent_killed_ms < 1000, figures


class ThisMachineFirst(SshHosts):
    """A script that names this machine, and another one later."""

    def flags(self, hosts: int) -> list[str]:
        self.hosts_file.write_text("localhost:1\n")
        return ["-np", "1", "--max-np", "2", "--host-discovery-script", f"cat {self.hosts_file}"]


@pytest.mark.timeout(120)
def test_a_host_that_comes_later_reaches_the_workers_of_this_machine(tmp_path: Path) -> None:
    with Lab(hosts=1) as lab:
        hosts = ThisMachineFirst(lab, tmp_path)
        with EngineJob(hosts, tmp_path, hosts=1) as job:
            job.train_with(1)
            hosts.add_host()
            job.train_with(2)
            assert job.stop() == 0
        assert hosts.leftovers() == []


@pytest.mark.timeout(120)
def test_when_the_launcher_is_killed_nothing_is_left_on_the_hosts(hosts: SshHosts, tmp_path: Path) -> None:
    with EngineJob(hosts, tmp_path, hosts=2) as job:
        job.train_with(2)
        job.process.kill()
        job.process.wait(LONG_S)
        deadline_s = time.monotonic() + LONG_S
        while any(_farandoles(host) for host in hosts.lab.hosts):
            assert time.monotonic() < deadline_s, [_farandoles(host) for host in hosts.lab.hosts]
            time.sleep(0.05)


def _farandoles(host: Host) -> list[int]:
    return [pid for pid, words in host.commands().items() if "farandole" in " ".join(words)]
