"""Commands of the system and waits for their effect: each with a deadline, and an error that names it. All files of the
lab use it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence

COMMAND_S = 10.0
_POLL_S = 0.002


class LabError(RuntimeError):
    """An operation of the lab failed; the message has the command, or the awaited condition."""


def run(command: Sequence[str], said: str = "") -> str:
    """Run the command and return its output. `said` is its stdin. Raises LabError when it fails or takes over
    COMMAND_S."""
    try:
        done = subprocess.run(command, input=said, capture_output=True, text=True, timeout=COMMAND_S)
    except subprocess.TimeoutExpired as error:
        raise LabError(f"{' '.join(command)} is not done after {COMMAND_S:g} s") from error
    if done.returncode:
        raise LabError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}\n{said}".rstrip())
    return done.stdout


def in_network_of(pid: int, command: Sequence[str]) -> list[str]:
    """Return the command that runs this one in the network namespace of a process."""
    return ["nsenter", "--target", str(pid), "--net", "--", *command]


def ip(pid: int, *lines: str) -> None:
    """Run each line as a command of `ip`, without that word, in the network namespace of a process."""
    run(in_network_of(pid, ["ip", "-batch", "-"]), "".join(f"{line}\n" for line in lines))


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = COMMAND_S) -> None:
    """Wait until the condition holds. Raises LabError, which names `what` was awaited."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise LabError(f"{what}: not so after {timeout_s:g} s")
        time.sleep(_POLL_S)
