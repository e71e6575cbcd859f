"""Commands of the system, waits for their effect, and control groups: each with a deadline, and an error that names it.
All files of the lab use it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

COMMAND_S = 10.0
_POLL_S = 0.002


class LabError(RuntimeError):
    """An operation of the lab failed; the message has the command, or the awaited condition.

    See the example of `Lab`.
    """


def run(command: Sequence[str], stdin: str = "") -> str:
    """Run the command and return its output. `stdin` is its stdin. Raises LabError when it fails or takes over
    COMMAND_S."""
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=COMMAND_S)
    except subprocess.TimeoutExpired as error:
        raise LabError(f"{' '.join(command)} did not end within {COMMAND_S:g} s") from error
    if done.returncode:
        raise LabError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}\n{stdin}".rstrip())
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
            raise LabError(f"{what}: not fulfilled within {timeout_s:g} s")
        time.sleep(_POLL_S)


# Control groups, whose processes are frozen, killed, or limited in memory together ------------------------------------
#
# Version 2 of them is used, or version 1 where only that exists.


_ENTER = 'n=$1; shift; while [ "$n" -gt 0 ]; do echo $$ > "$1" || exit 1; shift; n=$((n - 1)); done; exec "$@"'


@dataclass(frozen=True)
class Hierarchies:
    """The places of the kernel's files: `freezer` lists and freezes a group; `memory` None: not available."""

    freezer: Path
    is_second_version: bool
    memory: Path | None


@cache
def hierarchies() -> Hierarchies:
    """Find the hierarchies. Raises LabError when there are none."""
    second: Path | None = None
    first: dict[str, Path] = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, options, *_ = line.split()
        if kind == "cgroup2":
            second = second or Path(place)
        elif kind == "cgroup":
            first.update({name: Path(place) for name in options.split(",") if name in ("freezer", "memory")})
    memory = first.get("memory")
    if second is not None:
        if memory is None and "memory" in (second / "cgroup.controllers").read_text().split():
            with contextlib.suppress(OSError):  # a container with processes in this very group may not
                (second / "cgroup.subtree_control").write_text("+memory")
                memory = second
        return Hierarchies(second, True, memory)
    if "freezer" in first:
        return Hierarchies(first["freezer"], False, memory)
    raise LabError("no cgroup hierarchy that can freeze is mounted")


class Cgroup:
    """A control group, created with the object. Raises OSError where groups cannot be created."""

    def __init__(self, name: str) -> None:
        where = hierarchies()
        self._group = where.freezer / name
        self._is_second_version = where.is_second_version
        self._memory = where.memory / name if where.memory is not None else None
        self._group.mkdir(exist_ok=True)
        if self._memory is not None:
            self._memory.mkdir(exist_ok=True)

    def entering(self, command: Sequence[str]) -> list[str]:
        """Return the command that enters the group, with all its later children, and then is this one."""
        entrances = [f"{folder}/cgroup.procs" for folder in {self._group, self._memory} - {None}]
        return ["sh", "-c", _ENTER, "sh", str(len(entrances)), *entrances, *command]

    @property
    def memory_entrance(self) -> str | None:
        """The same file for the limit of memory alone, where that is a separate hierarchy."""
        return None if self._memory is None else f"{self._memory}/cgroup.procs"

    def pids(self) -> list[int]:
        """Return the process ids, as numbered in this process's namespace."""
        try:
            return [pid for pid in map(int, (self._group / "cgroup.procs").read_text().split()) if pid > 0]
        except FileNotFoundError:
            return []

    def freeze(self) -> None:
        """Freeze all processes; they have stopped when this returns."""
        if self._is_second_version:
            (self._group / "cgroup.freeze").write_text("1")
            events = self._group / "cgroup.events"
            wait_until(lambda: "frozen 1" in events.read_text(), f"{self._group.name} is frozen")
        else:
            (self._group / "freezer.state").write_text("FROZEN")
            state = self._group / "freezer.state"
            wait_until(lambda: state.read_text().strip() == "FROZEN", f"{self._group.name} is frozen")

    def thaw(self) -> None:
        name, text = ("cgroup.freeze", "0") if self._is_second_version else ("freezer.state", "THAWED")
        with contextlib.suppress(FileNotFoundError):
            (self._group / name).write_text(text)

    def limit_memory(self, limit_bytes: int) -> None:
        """Limit the memory: the kernel kills a process that wants more. Raises LabError where memory cannot be
        limited."""
        if self._memory is None:
            raise LabError("no cgroup hierarchy that limits memory is mounted")
        name = "memory.max" if self._memory == self._group else "memory.limit_in_bytes"
        (self._memory / name).write_text(str(limit_bytes))

    def remove(self) -> None:
        """Remove the group and all its processes: none is left when this returns. Raises LabError when that takes too
        long."""
        wait_until(self._kill, f"all processes of {self._group.name} have ended")
        for folder in (self._group, self._memory):
            if folder is not None:
                wait_until(lambda folder=folder: _is_removed(folder), f"{folder} is removed")  # type: ignore[misc]

    def _kill(self) -> bool:
        """Kill the processes and return whether none is left."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.thaw()  # version 1 does not let frozen processes die
        return not self.pids()


def cgroup_names(prefix: str) -> set[str]:
    """Return the names of all groups with this prefix."""
    where = hierarchies()
    places = {where.freezer, where.memory} - {None}
    return {path.name for place in places for path in place.glob(f"{prefix}*") if path.is_dir()}  # type: ignore[union-attr]


def _is_removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # a process that has just ended is still counted
        time.sleep(0.01)
        return False
    return True
