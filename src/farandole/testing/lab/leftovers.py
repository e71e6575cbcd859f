"""The removal of groups and folders of labs whose process was killed, found by name. Each new lab begins with it.

Hosts and networks end by themselves when their lab is gone; frozen hosts cannot, and files do not.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from farandole.testing.lab.cgroups import Cgroup, groups
from farandole.testing.lab.names import PREFIX, is_left_over


def leftovers() -> list[str]:
    """Return the names of groups and folders of labs that are gone."""
    return sorted({name for name in groups(PREFIX) if is_left_over(name)} | {path.name for path in _folders()})


def remains(name: str) -> list[str]:
    """Return the control groups and folders that remain of the lab of this name, which has been left."""
    folders = [path.name for path in Path(tempfile.gettempdir()).glob(f"{name}*")]
    return sorted(groups(name) | set(folders))


def remove_leftovers() -> None:
    """Kill the remaining processes and remove the files. Living labs, and labs of other PID namespaces, are not
    touched."""
    for name in groups(PREFIX):
        if is_left_over(name):
            Cgroup(name).remove()
    for path in _folders():
        shutil.rmtree(path, ignore_errors=True)


def _folders() -> list[Path]:
    return [path for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}-*") if is_left_over(path.name)]
