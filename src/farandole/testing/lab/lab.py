"""A lab: some hosts and the network between them, created when it is entered and removed when it is left, in any
way."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from farandole.testing.lab.cgroups import Cgroup
from farandole.testing.lab.host import Host
from farandole.testing.lab.leftovers import remove_leftovers
from farandole.testing.lab.names import new_name
from farandole.testing.lab.network import Network, Place
from farandole.testing.lab.requirements import why_not
from farandole.testing.lab.tools import LabError


class Lab:
    """A lab of `hosts` hosts that reach each other and their machine, which reaches them. All names differ from those
    of other labs on the same machine. It needs root: why_not() returns the reason if it is not possible.

    hosts    by index, running
    network  the network between them, with its faults
    """

    def __init__(self, hosts: int) -> None:
        if hosts < 1:
            raise ValueError(f"a lab has at least one host, not {hosts}")
        self._count = hosts
        self.name = new_name()
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
            self.hosts.append(Host(index, f"{self.name}.{own}", self.network, folder / own, hosts_file))
        places: list[Place] = [self.network.driver, *self.hosts]
        lines = ["127.0.0.1 localhost", *(f"{place.address} {place.name}" for place in places)]
        hosts_file.write_text("".join(f"{line}\n" for line in lines))
        for host in self.hosts:
            self._everything.callback(host.crash)
            host.boot()
