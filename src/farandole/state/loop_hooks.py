"""Queries from the lower layers to the run loop, which lies above them and installs itself here. Main thread only."""

from __future__ import annotations

import enum
from typing import Protocol


class RunLoop(Protocol):
    """The elastic run loop, as optimizer, loader and state see it."""

    def can_repeat(self) -> bool:
        """Return whether a fault in the current step can be absorbed: the loader will hand out its batch again."""
        ...

    def steps_decided(self) -> int:
        """Return the step counter."""
        ...

    def prepared(self) -> int:
        """Return the number of the planned generation for which this worker holds a PREPARE; 0 for none."""
        ...

    def agree(self, prepared_by_rank: list[int]) -> None:
        """Take note of the value that each rank holds: a planned change is agreed when all are equal."""
        ...

    def digest(self) -> int:
        """Return the digest of the state from the last boundary; 0 when nothing was hashed."""
        ...

    def has_saved(self) -> bool:
        """Return whether this rank has begun a checkpoint at the last boundary."""
        ...

    def compare(self, digests_by_rank: list[int], has_any_saved: bool) -> None:
        """Take note of the digests of all ranks, and of a checkpoint. Different digests mean different states."""
        ...

    def receives_updates(self) -> bool:
        """Return whether it answers `agreed_update`; otherwise only the state itself can know of host events."""
        ...

    def agreed_update(self) -> HostUpdateResult | None:
        """Return the change that all ranks adopt now, or None. Called by all ranks at the same commit."""
        ...

    def committing(self) -> None:
        """Note that a commit is being made: until committed(), it is neither the old one nor the new one."""
        ...

    def committed(self) -> None:
        """Note that the live state equals the new commit."""
        ...


_run_loop: RunLoop | None = None


def install(run_loop: RunLoop | None) -> None:
    """Install the run loop when it enters an elastic function, or remove it (None) when it leaves."""
    global _run_loop
    _run_loop = run_loop


def can_repeat() -> bool:
    return _run_loop is not None and _run_loop.can_repeat()


def steps_decided() -> int:
    """Return the step counter; 0 outside an elastic function, where steps are not counted."""
    return _run_loop.steps_decided() if _run_loop is not None else 0


def prepared() -> int:
    """Return RunLoop.prepared() for the step header; 0 outside an elastic function."""
    return _run_loop.prepared() if _run_loop is not None else 0


def agree(prepared_by_rank: list[int]) -> None:
    """Pass the values in the headers of all ranks, in order of rank, to RunLoop.agree()."""
    if _run_loop is not None:
        _run_loop.agree(prepared_by_rank)


def digest() -> int:
    """Return RunLoop.digest() for the step header; 0 outside an elastic function."""
    return _run_loop.digest() if _run_loop is not None else 0


def has_saved() -> bool:
    """Return RunLoop.has_saved() for the step header; False outside an elastic function."""
    return _run_loop is not None and _run_loop.has_saved()


def compare(digests_by_rank: list[int], has_any_saved: bool) -> None:
    """Pass the values in the headers of all ranks, in order of rank, to RunLoop.compare()."""
    if _run_loop is not None:
        _run_loop.compare(digests_by_rank, has_any_saved)


def receives_updates() -> bool:
    return _run_loop is not None and _run_loop.receives_updates()


def agreed_update() -> HostUpdateResult | None:
    return _run_loop.agreed_update() if _run_loop is not None else None


def committing() -> None:
    if _run_loop is not None:
        _run_loop.committing()


def committed() -> None:
    if _run_loop is not None:
        _run_loop.committed()


def is_elastic() -> bool:
    """Return whether an elastic function runs, so that the size of the world may change."""
    return _run_loop is not None


# The effect of host events on a job, in Horovod's numbers -------------------------------------------------------------
#
# State receives the events; the run loop agrees on them.


class HostUpdateResult(enum.IntFlag):
    """The effect of host changes. Several changes at once are combined with bitwise or."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added
