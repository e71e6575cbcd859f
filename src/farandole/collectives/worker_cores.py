"""Count the cores for threads that wait or work in the background."""

from __future__ import annotations

from farandole.cores import usable_cores as own_cores

__all__ = ["may_spin", "own_cores"]


def may_spin(local_size: int) -> bool:
    """Return whether a worker, one of `local_size` on its host, may wait for the others for a moment without sleeping.

    It may only while no other thread needs the core. To sleep and to be woken costs 10 to 100 us.
    """
    return own_cores() >= local_size
