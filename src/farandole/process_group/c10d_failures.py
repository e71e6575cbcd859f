"""Keep the error that ended the collectives of a generation, for callers that lost it on the way through C++."""

from __future__ import annotations

from farandole.collectives import world
from farandole.errors import RecoverableError

_seen: tuple[world.World, RecoverableError] | None = None


def remember(error: RecoverableError) -> None:
    """Store the error that an operation of a group has raised."""
    global _seen
    if world.is_entered() and getattr(error, "generation", None) == world.current().id.number:
        _seen = world.current(), error


def failure() -> RecoverableError | None:
    """Return the error that an operation of a group has raised in the current generation, which is over then.

    None if there is none. backward() of a DistributedDataParallel raises a RuntimeError of another type when a worker
    was lost: this is the original error. It is forgotten when the next generation begins.
    """
    if _seen is None or not world.is_entered() or _seen[0] is not world.current():
        return None
    return _seen[1]
