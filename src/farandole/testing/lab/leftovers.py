"""What labs have left behind whose process was killed: found by name, and removed. Each new lab begins with that.

Hosts end by themselves when their lab is gone, and networks with them; frozen hosts cannot, and files do not.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from farandole.testing.lab.cgroups import Cgroup, groups
from farandole.testing.lab.names import PREFIX, is_left_over


def leftovers() -> list[str]:
    """Names of groups and folders of labs that are gone."""
    return sorted({name for name in groups(PREFIX) if is_left_over(name)} | {path.name for path in _folders()})


def remains(name: str) -> list[str]:
    """What is still there of the lab of this name, which has been left: control groups, folders."""
    folders = [path.name for path in Path(tempfile.gettempdir()).glob(f"{name}*")]
    return sorted(groups(name) | set(folders))


def remove_leftovers() -> None:
    """Kills what still runs there. Nothing of labs that live, or of other PID namespaces, is touched."""
    for name in groups(PREFIX):
        if is_left_over(name):
            Cgroup(name).remove()
    for path in _folders():
        shutil.rmtree(path, ignore_errors=True)


def _folders() -> list[Path]:
    return [path for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}-*") if is_left_over(path.name)]
