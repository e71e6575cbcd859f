"""How many cores there are for whoever waits or works in the background."""

from __future__ import annotations

from farandole.cores import usable_cores as own_cores

__all__ = ["may_spin", "own_cores"]


def may_spin(local_size: int) -> bool:
    """Whether a worker, one of `local_size` on its host, may wait for the others without sleeping for a moment: only
    while nobody needs the core that it takes. To sleep and to be woken costs 10 to 100 us."""
    return own_cores() >= local_size
