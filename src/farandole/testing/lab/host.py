"""A host of a lab: its own namespaces for network, name, processes, shared memory and mounts; and its faults."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TypeAlias

from farandole.testing.lab.network import Network
from farandole.testing.lab.tools import COMMAND_S, Cgroup, LabError

_INIT = Path(__file__).with_name("init.py")
_PIDS_PER_BOOT = 1000
_NAMESPACES = ("--net", "--uts", "--ipc", "--pid", "--mount")
_DAY_S = 86400

StreamTarget: TypeAlias = int | IO[bytes] | None


class Host:
    """A running host, created by a Lab.

    With `has_own_clocks` its monotonic clock and its clock since boot are days ahead of the machine's, each host's
    by another time (Linux, man 7 time_namespaces). See the example of `Lab`.

    Args:
        index: Its number in the lab, from 0.
        group: The name of its control group.
        network: The network of the lab.
        folder: Its folder for temporary files.
        hosts_file: Its /etc/hosts.
        has_own_clocks: Its clocks differ from those of the machine.

    Attributes:
        index: Its number in the lab, from 0.
        name: Its name, also on itself and on the other hosts.
        address: Its address for the others and the machine.
        folder: For temporary files; TMPDIR of its processes. It is emptied when the host boots.

    Raises:
        LabError: From its methods: an operation failed, or did not end within its time limit.
    """

    def __init__(
        self, index: int, group: str, network: Network, folder: Path, hosts_file: Path, has_own_clocks: bool = False
    ) -> None:
        self.index, self.name = index, f"host{index}"
        self.address = network.address_of(index)
        self.folder = folder
        self._group_name, self._network, self._hosts_file = group, network, hosts_file
        self._has_own_clocks = has_own_clocks
        self._cgroup: Cgroup | None = None
        self._init: subprocess.Popen[bytes] | None = None
        self._init_pid = 0
        self._boots = 0
        self._started: list[subprocess.Popen[bytes]] = []

    def __repr__(self) -> str:
        return f"{self.name} ({self.address})"

    # Processes -------------------------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Whether the host runs: it was booted, and neither crashed nor powered off since then."""
        return self._init is not None and self._init.poll() is None

    def start(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        stdout: StreamTarget = None,
        stderr: StreamTarget = None,
    ) -> subprocess.Popen[bytes]:
        """Start a process on this host.

        Args:
            command: The program and its arguments.
            environment: Its variables, instead of those of this process.
            folder: Its working directory; by default that of this process.
            stdout: The destination of its output, as for subprocess.Popen.
            stderr: The destination of its errors.

        Returns:
            A process outside, which waits for it and ends as it does. Send signals to the process itself by signal(),
            with its process id on the host.

        Raises:
            LabError: The host is off.
        """
        if not self.is_up or self._cgroup is None:
            raise LabError(f"{self.name} is off; boot() it first")
        enter = ["nsenter", "--target", str(self._init_pid), *_NAMESPACES]
        enter += ["--time", "--"] if self._has_own_clocks else ["--"]
        inside = ["sh", "-c", 'cd "$0" && exec "$@"', str(folder or Path.cwd()), *command]
        process = subprocess.Popen(
            self._cgroup.entering([*enter, *inside]),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env={**(os.environ if environment is None else environment), "TMPDIR": str(self.folder)},
            start_new_session=True,
        )
        self._started = [*(each for each in self._started if each.poll() is None), process]
        return process

    def run(self, command: Sequence[str], timeout_s: float = 20.0) -> str:
        """Run a command on this host to its end.

        Args:
            command: The program and its arguments.
            timeout_s: The seconds that it may take.

        Returns:
            Its output and its errors, as text.

        Raises:
            LabError: The host is off, the command failed, or it took too long.
        """
        process = self.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            process.kill()
            process.communicate()
            raise LabError(f"{' '.join(command)} on {self.name} did not end within {timeout_s:g} s") from error
        text = output.decode(errors="replace")
        if process.returncode:
            raise LabError(f"{' '.join(command)} on {self.name} ended with {process.returncode}: {text.strip()}")
        return text

    def processes(self) -> dict[int, int]:
        """Return all processes of the host except its first: process id on the host -> process id outside."""
        found = {}
        for pid in self._cgroup.pids() if self._cgroup is not None else []:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                numbers = _numbers(pid)
                if len(numbers) > 1 and numbers[-1] != 1:
                    found[numbers[-1]] = pid
        return found

    def commands(self) -> dict[int, list[str]]:
        """Return the command lines of these processes, by their process ids on the host."""
        found = {}
        for inside, outside in self.processes().items():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                words = Path(f"/proc/{outside}/cmdline").read_bytes().split(b"\0")
                found[inside] = [word.decode(errors="replace") for word in words]
        return found

    def signal(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a process.

        Args:
            pid: Its process id on the host.
            number: The signal.

        Raises:
            ProcessLookupError: The host has no such process.
        """
        outside = self.processes().get(pid)
        if outside is None:
            raise ProcessLookupError(f"there is no process {pid} on {self.name}")
        os.kill(outside, number)

    # Faults ----------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Stop all its processes, which do not notice it; its network still answers pings."""
        self._need_cgroup().freeze()

    def thaw(self) -> None:
        """Let the processes of a frozen host continue."""
        self._need_cgroup().thaw()

    def limit_memory(self, limit_bytes: int) -> None:
        """Limit the memory of all its processes together; the kernel kills one when they want more.

        Args:
            limit_bytes: The limit, in bytes.
        """
        self._need_cgroup().limit_memory(limit_bytes)

    def power_off(self) -> None:
        """End all its processes without a notice to peers: no connection is closed or reset."""
        self._network.cut(self)
        self.crash()

    def crash(self) -> None:
        """Kill all its processes at once; the kernel closes their connections."""
        if self._init is None:
            return
        self._init.kill()  # and with it, the child that is the host's first process
        if self._cgroup is not None:
            self._cgroup.remove()
        for process in (self._init, *self._started):
            process.wait(COMMAND_S)
        self._started.clear()
        for stream in (self._init.stdin, self._init.stdout):
            if stream is not None:
                stream.close()
        self._init = self._cgroup = None
        self._network.disconnect(self.index)

    def boot(self) -> None:
        """Start the host again, with its cable; no process runs on it yet."""
        if self.is_up:
            return
        self.crash()  # the rest of it, if its first process ended by itself
        self._network.heal(self)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self._boots += 1
        last_pid = _PIDS_PER_BOOT * self._boots
        self._cgroup = Cgroup(self._group_name)
        clocks = ["--time", f"--monotonic={self._days_ahead * _DAY_S}", f"--boottime={self._days_ahead * 2 * _DAY_S}"]
        unshare = ["unshare", *_NAMESPACES, *(clocks if self._has_own_clocks else []), "--fork", "--kill-child=KILL"]
        init = [sys.executable, "-I", "-S", str(_INIT), self.name, str(self._hosts_file), str(last_pid)]
        self._init = subprocess.Popen(
            self._cgroup.entering([*unshare, "--", *init]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._init.stdout is not None
        output = self._init.stdout.readline()
        if not output:
            raise LabError(f"{self.name} did not start: its first process ended with {self._init.wait()}")
        self._init_pid = int(output)
        self._network.connect(self.index, self._init_pid)

    @property
    def _days_ahead(self) -> int:
        """After each boot others, as those of a machine that was off."""
        return 1 + 3 * self.index + self._boots

    def _need_cgroup(self) -> Cgroup:
        if self._cgroup is None:
            raise LabError(f"{self.name} is off; boot() it first")
        return self._cgroup


def _numbers(pid: int) -> list[int]:
    """Return the ids of a process, from this PID namespace inwards."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return [int(number) for number in line.split()[1:]]
    return [pid]
