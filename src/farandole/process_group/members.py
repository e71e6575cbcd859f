"""Who is in a group, and how they reach each other. group.py asks."""

from __future__ import annotations

from typing import Protocol

from farandole.collectives import world
from farandole.collectives.transport import Transport


class Members(Protocol):
    """Of one group. `rank` and `size` may change with the generation."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def transport(self, op: str) -> Transport:
        """For the operation `op`, which is about to begin. Raises what makes it impossible."""
        ...

    def close(self) -> None: ...


class Everybody:
    """All workers of the current generation, whichever that is."""

    @property
    def rank(self) -> int:
        return world.current().placement.rank

    @property
    def size(self) -> int:
        return world.current().placement.size

    def transport(self, op: str) -> Transport:
        world.raise_if_refused(op)
        return world.current().transport

    def close(self) -> None:
        """The world stays: it is fd.shutdown() that leaves it."""
