"""The question before a command changes a job of another user: who can read the job file of a colleague, such as root,
should not change that job by mistake."""

from __future__ import annotations

import os
import pwd
import sys
from pathlib import Path

from farandole.errors import FatalError


class NoConsent(FatalError):
    """The user did not agree, or could not be asked."""


def require_consent(job_file: Path | None, change: str) -> None:
    """Ask on the terminal if the job of this file was started by another user. Raises NoConsent if the answer is not
    yes, and without a terminal.

    Args:
        job_file: The file of --job-file; None: a job of this user on this machine.
        change: What would be done, as in "scale it to 3 workers".
    """
    owner = None if job_file is None else _other_owner(job_file)
    if owner is None:
        return
    whose = f"{job_file} is the file of a job of {owner}, and you are {_name(os.getuid())}"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise NoConsent(f"{whose}: to {change}, add --yes")
    print(f"{whose}. {change.capitalize()}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise NoConsent("nothing was changed")


def _other_owner(path: Path) -> str | None:
    """Return the name of the file's owner; None if that is this user, or if there is no such file."""
    try:
        owner = path.stat().st_uid
    except OSError:
        return None
    return None if owner == os.getuid() else _name(owner)


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"
