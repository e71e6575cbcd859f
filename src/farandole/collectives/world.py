"""The process's view of the current generation; rank(), the optimizer and the run loop read it here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from farandole.collectives.transport import Transport
from farandole.errors import NotInitialized
from farandole.membership import GenerationId, Placement

if TYPE_CHECKING:
    from farandole.collectives.named.engine import NamedCollectives


@dataclass(frozen=True)
class World:
    """One generation as this worker sees it.

    transport       for the main thread: gradients, agreements, state. All ranks make the same calls in the same order
    named           the named collectives, on connections of their own
    is_homogeneous  every host has the same number of workers
    """

    id: GenerationId
    placement: Placement
    transport: Transport
    named: NamedCollectives | None = None
    is_homogeneous: bool = True


_current: World | None = None


def enter(world: World | None) -> None:
    """Make `world` the current one; None after shutdown()."""
    global _current
    _current = world


def current() -> World:
    """The current world. Raises NotInitialized before init() and after shutdown()."""
    if _current is None:
        raise NotInitialized("Farandole has not been initialized; call farandole.init() first")
    return _current


def is_entered() -> bool:
    """Whether there is a current world."""
    return _current is not None
