"""The names in a lab, which show the creating process, and whether it still lives."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

PREFIX = "frlab"
_NAME = re.compile(rf"{PREFIX}-(\d+)-(\d+)-(\d+)-[0-9a-f]+")


def new_name() -> str:
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
