"""A Slurm cluster of its own for tests: munged, slurmctld and a slurmd for each node, without systemd. Its nodes are
the hosts of a lab, so that they can be cut off."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from farandole.testing import lab
from farandole.testing.lab import Host, Lab

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
_DEADLINE_S = 30.0
_SLURM_CONF = """
ClusterName=farandole
SlurmctldHost={controller}({controller_address})
SlurmctldPort=6817
SlurmdPort=6818
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
SlurmdTimeout={node_timeout_s}
KillWait=10
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def why_not() -> str | None:
    """Return why there can be no Slurm cluster on this machine; None: there can."""
    missing = [program for program in _PROGRAMS if shutil.which(program, path=_PATH) is None]
    if missing:
        return f"Slurm is not installed ({', '.join(missing)}): apt-get install slurm-wlm munge, or make test-engines"
    return lab.why_not()


_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class SlurmCluster:
    """A cluster to be used in a `with`.

    nodes           how many nodes, each with `cpus` CPUs; their names are `names`
    node_timeout_s  seconds after which Slurm declares a silent node down (its default is 300)
    environment     for its commands, and for all commands that call them
    """

    def __init__(self, nodes: int, cpus: int = 2, node_timeout_s: int = 20) -> None:
        self._lab = Lab(nodes + 1)
        self._nodes, self._cpus, self._node_timeout_s = nodes, cpus, node_timeout_s
        self.folder: Path
        self.environment: Mapping[str, str]
        self._everything = contextlib.ExitStack()

    def __enter__(self) -> SlurmCluster:
        try:
            self._everything.enter_context(self._lab)
            # Processes and files go with the lab, also if the tests are killed.
            self.folder = self._lab.hosts[-1].folder
            # Slurm passes a job's environment on to its nodes.
            own = {"SLURM_CONF": f"{self.folder}/slurm.conf", "TMPDIR": str(self.folder), "PATH": _PATH}
            self.environment = {**os.environ, **own}
            self._start()
        except BaseException:
            self._everything.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for log in sorted(self.folder.glob("*.log")):
                print(f"{log.name}:", *log.read_text().splitlines()[-30:], sep="\n  ")
        self._everything.close()

    @property
    def names(self) -> list[str]:
        """The names of the nodes."""
        return [host.name for host in self._lab.hosts[: self._nodes]]

    def host(self, name: str) -> Host:
        """Return the host that is the node of this name."""
        return next(host for host in self._lab.hosts if host.name == name)

    def cut_off(self, name: str) -> None:
        """Cut the cable of a node."""
        self._lab.network.cut(self.host(name))

    def commands_on(self, name: str) -> dict[int, list[str]]:
        """Return the command lines of the processes of a node, by their number on it."""
        return self.host(name).commands()

    def run(self, *command: str, timeout_s: float = _DEADLINE_S) -> str:
        """Return the output of one of Slurm's commands."""
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=self.environment)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = _DEADLINE_S) -> None:
        """Wait for a condition, or fail."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
            time.sleep(0.1)

    def _start(self) -> None:
        *nodes, controller = self._lab.hosts
        (self.folder / "state").mkdir()
        (self.folder / "munge").mkdir(mode=0o755)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        (self.folder / "slurm.conf").write_text(
            _SLURM_CONF.format(
                controller=controller.name,
                controller_address=controller.address,
                folder=self.folder,
                node_timeout_s=self._node_timeout_s,
                nodes="\n".join(
                    f"NodeName={node.name} NodeAddr={node.address} CPUs={self._cpus} RealMemory=1000 State=UNKNOWN"
                    for node in nodes
                ),
            )
        )
        self._start_munged(controller, key)
        self._start_daemon(controller, ["slurmctld", "-D"])
        for node in nodes:
            (self.folder / f"spool.{node.name}").mkdir()
            self._start_daemon(node, ["slurmd", "-D", "-N", node.name])
        self.wait_until(self._are_all_idle, f"{self._nodes} idle nodes")

    def _start_munged(self, controller: Host, key: Path) -> None:
        """Start it once: all hosts have the same file system, and so its socket."""
        folder = self.folder / "munge"
        command = [
            *("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/socket"),
            *(f"--pid-file={folder}/pid", f"--log-file={folder}/log", f"--seed-file={folder}/seed"),
        ]
        self._start_daemon(controller, command)
        self.wait_until((folder / "socket").exists, "the socket of munged")

    def _start_daemon(self, host: Host, command: Sequence[str]) -> None:
        """Start a daemon on a host, whose processes end with the lab."""
        path = shutil.which(command[0], path=_PATH)
        assert path is not None
        with (self.folder / f"{command[0]}.{host.name}.out.log").open("wb") as log:
            host.start([path, *command[1:]], environment=self.environment, stdout=log, stderr=log)

    def _are_all_idle(self) -> bool:
        command = ["sinfo", "--noheader", "--Node", "--format=%N %T"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, env=self.environment)
        return done.stdout.split().count("idle") == self._nodes
