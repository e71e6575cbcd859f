"""The requirements of a lab on this machine. Tests that need one are skipped with the reason."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from functools import cache

from farandole.testing.lab.cgroups import Cgroup
from farandole.testing.lab.names import new_name
from farandole.testing.lab.tools import LabError, run

_COMMANDS = ("ip", "tc", "nsenter", "unshare", "mount", "sh")


@cache
def why_not() -> str | None:
    """Return why hosts are impossible here; None: they are possible. Operations that may be forbidden are tried,
    without any remains."""
    if not sys.platform.startswith("linux"):
        return f"hosts are namespaces of Linux, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "hosts are namespaces, and those take root"
    missing = [command for command in _COMMANDS if shutil.which(command) is None]
    if missing:
        return f"hosts are made with commands that are not installed: {', '.join(missing)}"
    try:
        with contextlib.closing(_Trial()):
            run(["unshare", "--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "ip", "link", "set", "lo", "up"])
    except (LabError, OSError) as error:
        return f"this machine does not let namespaces or control groups be made: {error}"
    return None


class _Trial:
    """A control group that is created and removed."""

    def __init__(self) -> None:
        self._cgroup = Cgroup(f"{new_name()}.trial")

    def close(self) -> None:
        self._cgroup.remove()
