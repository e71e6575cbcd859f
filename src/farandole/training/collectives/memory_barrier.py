"""A barrier on control blocks: a waiting rank spins for a moment, then sleeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from farandole.base.liveness.status_reporting import WaitingForPeers
from farandole.base.machine import may_spin
from farandole.training.collectives.control_blocks import ControlBlock

TroubleT = TypeVar("TroubleT")

# One check takes about 0.1 us. A sleep and a wake-up take 10 to 50 us, of a core that others could use.
_SPINS = 300
_SLEEP_S = 0.002  # between two checks; an abort wakes at once, except in the moment before falling asleep


class MemoryBarrier(Generic[TroubleT]):
    """A barrier on the `control_blocks` of all ranks, by rank. For one thread; wake() is for any.

    `look_around` is called every few milliseconds while this rank sleeps; it returns a reason to stop waiting, or None.
    """

    def __init__(
        self, rank: int, control_blocks: Sequence[ControlBlock], look_around: Callable[[], TroubleT | None]
    ) -> None:
        self._mine = control_blocks[rank]
        self._others = [control_block for other, control_block in enumerate(control_blocks) if other != rank]
        self._look_around = look_around
        self._spins = _SPINS if may_spin(len(control_blocks)) else 0
        self._times = 0

    def arrive(self) -> None:
        """Announce that all data that this rank has stored so far is visible."""
        self._times += 1
        self._mine.arrive()

    def wait(self) -> TroubleT | None:
        """Wait until all ranks have arrived as often as this one. Return None, or the reason to stop waiting.

        An arrival stays valid: a complete operation counts, even if a rank was lost since.
        """
        for control_block in self._others:
            for _ in range(self._spins):
                if control_block.has_arrived(self._times):
                    break
            if not control_block.has_arrived(self._times):
                with WaitingForPeers():
                    trouble = self._sleep_until_arrival(control_block)
                if trouble is not None:
                    return trouble
        return None

    def _sleep_until_arrival(self, control_block: ControlBlock) -> TroubleT | None:
        while not control_block.has_arrived(self._times):
            trouble = self._look_around()
            # Checked again: its arrival may have been its last action before it left.
            if trouble is not None and not control_block.has_arrived(self._times):
                return trouble
            control_block.wait(self._times, _SLEEP_S)
        return None

    def wake(self) -> None:
        """Make this rank check now. Callable from any thread. The others check too, and sleep on."""
        for control_block in self._others:
            control_block.wake()
