"""Questions that the layers below ask the run loop, which sits above them. Main thread only."""

from __future__ import annotations

from typing import Protocol

from farandole.state.host_updates import HostUpdateResult


class RunLoop(Protocol):
    """The elastic run loop, as optimizer, loader and state see it."""

    def can_repeat(self) -> bool:
        """Whether a fault in the step in flight can be absorbed: the loader will hand out its batch again."""
        ...

    def steps_decided(self) -> int:
        """The step counter."""
        ...

    def prepared(self) -> int:
        """Number of the planned generation this worker holds a PREPARE for; 0 for none."""
        ...

    def agree(self, prepared_by_rank: list[int]) -> None:
        """Take note of what every rank holds: a planned change is agreed when all hold the same."""
        ...

    def digest(self) -> int:
        """What was hashed of the state at the last boundary; 0 for nothing."""
        ...

    def has_saved(self) -> bool:
        """Whether this rank has begun a checkpoint at the last boundary."""
        ...

    def compare(self, digests_by_rank: list[int], has_any_saved: bool) -> None:
        """Take note of what every rank has hashed: where they differ, states do; and of a checkpoint."""
        ...

    def hears_of_updates(self) -> bool:
        """Whether it answers `agreed_update`; else nobody but the state itself can know of host events."""
        ...

    def agreed_update(self) -> HostUpdateResult | None:
        """Called by all ranks at the same commit: the change that all of them go along with now; None: none."""
        ...

    def committing(self) -> None:
        """A commit is being made: until committed(), it is neither the old one nor the new one."""
        ...

    def committed(self) -> None:
        """What is live is what was committed just now."""
        ...


_run_loop: RunLoop | None = None


def install(run_loop: RunLoop | None) -> None:
    """The run loop enters (or, with None, leaves) an elastic function."""
    global _run_loop
    _run_loop = run_loop


def can_repeat() -> bool:
    return _run_loop is not None and _run_loop.can_repeat()


def steps_decided() -> int:
    """The step counter; 0 outside an elastic function, where nobody counts."""
    return _run_loop.steps_decided() if _run_loop is not None else 0


def prepared() -> int:
    """For the step header; 0 outside an elastic function."""
    return _run_loop.prepared() if _run_loop is not None else 0


def agree(prepared_by_rank: list[int]) -> None:
    """From the headers of all ranks, in order of rank."""
    if _run_loop is not None:
        _run_loop.agree(prepared_by_rank)


def digest() -> int:
    """For the step header; 0 outside an elastic function."""
    return _run_loop.digest() if _run_loop is not None else 0


def has_saved() -> bool:
    """For the step header; False outside an elastic function."""
    return _run_loop is not None and _run_loop.has_saved()


def compare(digests_by_rank: list[int], has_any_saved: bool) -> None:
    """From the headers of all ranks, in order of rank."""
    if _run_loop is not None:
        _run_loop.compare(digests_by_rank, has_any_saved)


def hears_of_updates() -> bool:
    return _run_loop is not None and _run_loop.hears_of_updates()


def agreed_update() -> HostUpdateResult | None:
    return _run_loop.agreed_update() if _run_loop is not None else None


def committing() -> None:
    if _run_loop is not None:
        _run_loop.committing()


def committed() -> None:
    if _run_loop is not None:
        _run_loop.committed()


def is_elastic() -> bool:
    """Whether an elastic function runs, so that the world may change its size."""
    return _run_loop is not None
