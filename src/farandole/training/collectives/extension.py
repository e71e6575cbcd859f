"""What an integration adds to the world of a worker: operations of its own, on connections of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Protocol

from farandole import registry
from farandole.base.membership import Placement
from farandole.training.collectives.transport import Transport

Connect = Callable[[tuple[int, ...], int], Transport]
"""connect(global ranks, number): connect a transport among these ranks only; all of them call it at once, with a number
that tells it from the others of its generation."""


class SomeRanks(Protocol):
    """Some of the ranks: a fd.ProcessSet, whose id is 0 if it is that of all ranks."""

    process_set_id: int | None

    def included(self) -> bool | None:
        """Return whether this worker is one of them; None before init()."""
        ...


def are_all(ranks: SomeRanks | None) -> bool:
    return ranks is None or ranks.process_set_id == 0


class End(Protocol):
    def take(self) -> object: ...


class Extension(Protocol):
    """The extension of one world, from the start of its generation to the end. Its transport is its own."""

    def begin_end(self) -> End:
        """Begin the orderly end: this rank's elastic function has returned. take() waits until it has on all ranks, and
        raises CollectiveMismatch, on all of them, when another rank waits for this one in an operation."""
        ...

    def abort(self, reason: str) -> None:
        """End running, waiting and later operations with GenerationEnded. Callable from any thread."""
        ...

    def wait_until_quiet(self) -> None:
        """Wait, after abort(), until no operation touches a tensor of the user any more."""
        ...

    def close(self) -> None:
        """Leave in an orderly way, and close all connections. Idempotent; returns at once after abort()."""
        ...


class Extender(Protocol):
    """Makes the extension of each world of this process, and hears of what happens to the membership."""

    @property
    def carries_over(self) -> bool:
        """True when the next world has to get what this one was given: carry_over() is called then, on all ranks."""
        ...

    def begin(self, process_sets: Sequence[SomeRanks] | str | None) -> None:
        """Begin the time from init() to shutdown(), with an argument of init(). Raises ValueError if it is wrong."""
        ...

    def extend(self, transport: Transport, placement: Placement, connect: Connect) -> Extension:
        """Return the extension of a new world. Raises ConfigError for settings that are not possible."""
        ...

    def entered(self, is_newcomer: bool) -> None:
        """Take part in init(), whose world is entered. A collective, unless this worker is not admitted yet."""
        ...

    def carry_over(self, was_newcomer: bool) -> None:
        """Give the current world what the last one had. A collective."""
        ...

    def settled(self) -> None:
        """Note that the current world works, and the one before it is over."""
        ...

    def left(self) -> None:
        """Note that this worker has left the world, by shutdown()."""
        ...


@cache
def extenders() -> Mapping[str, Extender]:
    """Return the extenders that are registered, by name: the same on all ranks, in the same order."""
    return {name: registry.part(place)() for name, place in registry.EXTENDERS.items()}
