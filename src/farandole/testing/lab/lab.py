"""A lab: some hosts and the network between them, created when it is entered and removed when it is left, in any way;
its name, its requirements, and what it may leave behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import TracebackType

from farandole.testing.lab.host import Host
from farandole.testing.lab.network import Network, NetworkNode
from farandole.testing.lab.tools import Cgroup, LabError, cgroup_names, run


class Lab:
    """A lab of hosts that reach each other and their machine, which reaches them. All names differ from those of other
    labs on the same machine. It needs root: why_not() returns the reason if it is not possible.

    Args:
        hosts: The number of hosts, at least 1.
        own_clocks: The clocks of each host differ from those of the others and of the machine, by days; not the
            date.

    Attributes:
        hosts: The hosts, by index, running.
        network: The network between them, with its faults.

    Raises:
        ValueError: There is no host.
        LabError: On entering the `with`: it is not possible here; nothing of it is left then.

    Examples:
        ```python
        from farandole.testing.lab import Lab, why_not

        if why_not() is None:  # else the reason: root, commands, kernel
            with Lab(hosts=2) as lab:
                print(lab.hosts[0].run(["hostname"]))
                lab.network.cut(lab.hosts[1])
                lab.network.heal()
        ```
    """

    def __init__(self, hosts: int, *, own_clocks: bool = False) -> None:
        if hosts < 1:
            raise ValueError(f"a lab has at least one host, not {hosts}")
        self._count, self._own_clocks = hosts, own_clocks
        self.name = new_lab_name()
        self.hosts: list[Host] = []
        self.network: Network
        self._everything = contextlib.ExitStack()

    def __enter__(self) -> Lab:
        """Create the lab. Raises LabError when that fails; nothing of it is left then."""
        reason = why_not()
        if reason is not None:
            raise LabError(reason)
        remove_leftovers()
        try:
            self._make()
        except BaseException:
            self._everything.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._everything.close()

    def _make(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix=f"{self.name}-"))
        self._everything.callback(shutil.rmtree, folder, ignore_errors=True)
        group = Cgroup(f"{self.name}.router")
        self._everything.callback(group.remove)
        self.network = Network(group)
        self._everything.callback(self.network.close)
        hosts_file = folder / "hosts"
        for index in range(self._count):
            own = f"host{index}"
            self.hosts.append(
                Host(index, f"{self.name}.{own}", self.network, folder / own, hosts_file, self._own_clocks)
            )
        places: list[NetworkNode] = [self.network.driver, *self.hosts]
        lines = ["127.0.0.1 localhost", *(f"{place.address} {place.name}" for place in places)]
        hosts_file.write_text("".join(f"{line}\n" for line in lines))
        for host in self.hosts:
            self._everything.callback(host.crash)
            host.boot()


# Leftovers: groups and folders of labs whose process was killed, found by name ----------------------------------------
#
# Each new lab begins with their removal. Hosts and networks end by themselves when their lab is gone; frozen hosts
# cannot, and files do not.


def leftovers() -> list[str]:
    """Return the names of groups and folders of labs that are gone."""
    return sorted({name for name in cgroup_names(PREFIX) if is_left_over(name)} | {path.name for path in _folders()})


def remains(name: str) -> list[str]:
    """Return the control groups and folders that remain of the lab of this name, which has been left."""
    folders = [path.name for path in Path(tempfile.gettempdir()).glob(f"{name}*")]
    return sorted(cgroup_names(name) | set(folders))


def remove_leftovers() -> None:
    """Kill the remaining processes and remove the files. Living labs, and labs of other PID namespaces, are not
    touched."""
    for name in cgroup_names(PREFIX):
        if is_left_over(name):
            Cgroup(name).remove()
    for path in _folders():
        shutil.rmtree(path, ignore_errors=True)


def _folders() -> list[Path]:
    return [path for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}-*") if is_left_over(path.name)]


# The names in a lab, which show the creating process, and whether it still lives --------------------------------------

PREFIX = "frlab"
_NAME = re.compile(rf"{PREFIX}-(\d+)-(\d+)-(\d+)-[0-9a-f]+")


def new_lab_name() -> str:
    """Return frlab-NAMESPACE-PROCESS-STARTED-RANDOM, of this process. Process ids are valid in one PID namespace only,
    and are reused: hence the first and the third."""
    return f"{PREFIX}-{_namespace()}-{os.getpid()}-{_started(os.getpid())}-{secrets.token_hex(3)}"


def is_left_over(name: str) -> bool:
    """Return whether the name belongs to a lab whose process, one of this PID namespace, is gone."""
    found = _NAME.match(name)
    if found is None:
        return False
    namespace, pid, started = map(int, found.groups())
    return namespace == _namespace() and _started(pid) != started


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _started(pid: int) -> int | None:
    """Return when a process was started, in ticks since the machine was; None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *others = text[text.rindex(")") + 2 :].split()
    return None if state in "ZX" else int(others[18])


# The requirements of a lab on this machine: tests that need one are skipped with the reason ---------------------------

_COMMANDS = ("ip", "tc", "nsenter", "unshare", "mount", "sh")


@cache
def why_not() -> str | None:
    """Return why hosts are impossible here; None: they are possible. Operations that may be forbidden are tried,
    without any remains.

    See the example of `Lab`.
    """
    if not sys.platform.startswith("linux"):
        return f"hosts are namespaces of Linux, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "hosts are namespaces, which need root"
    missing = [command for command in _COMMANDS if shutil.which(command) is None]
    if missing:
        return f"hosts are made with commands that are not installed: {', '.join(missing)}"
    try:
        group = Cgroup(f"{new_lab_name()}.trial")
        try:
            run(["unshare", "--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "ip", "link", "set", "lo", "up"])
        finally:
            group.remove()
    except (LabError, OSError) as error:
        return f"this machine does not permit namespaces or control groups: {error}"
    return None
