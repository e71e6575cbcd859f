"""Local batches that follow the speed of the workers: balance="auto" of a DataLoader.

Each worker measures the time that it takes for its part of a step without waiting for others, and sends it in the step
header. So all of them know the times of all, and divide the following global batches alike (division_by_speed.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeAlias

import torch

from farandole.base.liveness import status_reporting
from farandole.base.machine import now_ns
from farandole.errors import ConfigError
from farandole.training.data.division_by_speed import (
    LEAST_SHARE,
    MOST_SHARE,
    Counts,
    SpeedDivision,
    Straggler,
    Stragglers,
)
from farandole.training.data.partition import BatchLayout, next_global_batch
from farandole.training.state.batch import GlobalBatch
from farandole.training.state.session import Timer

logger = logging.getLogger("farandole")

Note: TypeAlias = tuple[int, int]
"""What a worker tells the others when they meet: the cost of a sample on it, in picoseconds, 0 if it is unknown; and
the number of batches that its loader fetches ahead."""


class Turns:
    """The division of each global batch: the present one, and the next one.

    at  epoch and first position of the first global batch that has the next one; None: there is none
    """

    def __init__(self) -> None:
        self.reset(())

    def reset(self, counts: Counts) -> None:
        """Divide all further global batches so."""
        self._now = self._next = counts
        self.at: tuple[int, int] | None = None

    def turn(self, counts: Counts, at: tuple[int, int]) -> None:
        """Divide global batches from `at` on so."""
        self._next, self.at = counts, at

    def passed(self, epoch: int, start: int) -> None:
        """Note that the global batch at this place is decided."""
        if self.at is not None and (epoch, start) >= self.at:
            self.reset(self._next)

    def of(self, epoch: int, start: int) -> Counts:
        """Return the division of the global batch at this place."""
        return self._next if self.at is not None and (epoch, start) >= self.at else self._now


class OwnTime:
    """A clock that does not run while this worker waits for others."""

    def __init__(self) -> None:
        self._ns = 0
        self._since: tuple[int, int] | None = None  # the time, and that spent in waiting until then; None: it stands
        self._has_device = torch.cuda.is_available()
        self._devices: list[int] = []  # those that this process uses, once it does

    def run(self) -> None:
        """Let the clock run from now on; the time since the last run() does not count."""
        self._since = now_ns(), status_reporting.waited_ns()

    def stop(self) -> None:
        """Stop the clock; the time since run() counts."""
        if self._since is None:
            return
        if self._has_device and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # What a device has not computed yet is this worker's time. A model can be on another one than the current.
            self._devices = self._devices or [
                place for place in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(place)
            ]
            for place in self._devices:
                torch.cuda.current_stream(place).synchronize()
        began_ns, waited_ns = self._since
        self._ns += max(0, now_ns() - began_ns - (status_reporting.waited_ns() - waited_ns))
        self._since = None

    def take(self) -> int:
        """Return the time that has counted since the last take(), in nanoseconds."""
        taken, self._ns = self._ns, 0
        return taken


class Balance(Timer):
    """The balance of one loader. Main thread only."""

    is_needed = True

    def __init__(self, fetched_ahead: int) -> None:
        """`fetched_ahead`: most batches that the loader requests before they are trained."""
        self.turns = Turns()
        self._fetched_ahead = fetched_ahead
        self._clock = OwnTime()
        self._rank, self._own_cost, self._delay = 0, 0, fetched_ahead
        self._division: SpeedDivision | None = None  # None: there is one worker
        self._stragglers = Stragglers(1)
        self._changes: list[Straggler] = []
        self._samples: tuple[int, ...] = ()
        self._own_ns: tuple[int, ...] = ()
        self._is_first = True  # the first step of a generation takes longer than others

    # When workers meet -----------------------------------------------------------------------------------

    def note(self) -> Note:
        """Return what the others have to know of this worker."""
        return self._own_cost, self._fetched_ahead

    def begin(self, layout: BatchLayout, notes: Sequence[Sequence[int]], rank: int) -> None:
        """Begin a generation, with the notes of all ranks, by rank: batches that are fetched from now on are divided
        anew. Raises ConfigError where some workers do not balance."""
        without = [rank for rank, each in enumerate(notes) if not each]
        if without:
            raise ConfigError(
                f"ranks {without} have a DataLoader without balance, the others one with it: give all workers the same "
                f"argument"
            )
        costs, self._delay = [cost for cost, _ in notes], max(ahead for _, ahead in notes)
        self._rank, self._is_first = rank, True
        self._clock.take()
        units, least, most = _limits(layout, len(notes))
        self._division = SpeedDivision(units, least, most, costs, self._delay) if len(notes) > 1 else None
        self._stragglers, self._changes = Stragglers(len(notes)), []
        self.turns.reset(self._division.counts if self._division is not None else ())

    # In each step ----------------------------------------------------------------------------------------

    def handing_out(self) -> None:
        """Note that a global batch is about to be handed out: what follows is this worker's time."""
        self._samples = self._own_ns = ()
        self._clock.run()

    def take_own_ns(self) -> int:
        """Return this worker's time for the step whose gradients it is about to reduce, in nanoseconds."""
        self._clock.stop()
        return self._clock.take()

    def agreed(self, samples: Sequence[int], own_ns: Sequence[int]) -> None:
        """Note the samples and times of all ranks, by rank, which came with a reduction of the step."""
        before = self._own_ns or (0,) * len(own_ns)
        self._samples = tuple(samples)
        self._own_ns = tuple(map(sum, zip(before, own_ns, strict=True)))
        self._clock.run()

    def decided(self, layout: BatchLayout, global_batch: GlobalBatch) -> bool:
        """Note that the step of a global batch is decided. Return whether global batches from `turns.at` on are divided
        otherwise."""
        self._clock.stop()
        self.turns.passed(global_batch.epoch, global_batch.start)
        # Loader processes are started in the first step of an epoch, which takes all workers equally long.
        starts = self._delay > 0 and global_batch.start == 0
        division, is_first, self._is_first = self._division, self._is_first or starts, False
        if division is None or not self._own_ns:
            status_reporting.set_balance(1.0, _speed(self._own_cost))
            return False
        is_whole = global_batch.global_samples == layout.global_batch_size
        # In an audited step each rank has computed one shard more.
        more = 0 if global_batch.audit is None else layout.global_batch_size // layout.shards
        samples = [count + more for count in self._samples]
        has_changed = is_whole and not is_first and division.measured(samples, self._own_ns)
        costs = division.costs
        self._own_cost = costs[self._rank] or self._own_cost
        self._changes += self._stragglers.update(costs)
        status_reporting.set_balance(division.shares[self._rank], _speed(self._own_cost))
        if has_changed:
            at = (global_batch.epoch, global_batch.stop)
            for _ in range(self._delay):
                at = next_global_batch(layout, *at)
            self.turns.turn(division.counts, at)
            self._log(division)
        return has_changed

    def take_changes(self) -> list[Straggler]:
        """Return the ranks that have become stragglers since the last call, or are none any more."""
        changes, self._changes = self._changes, []
        return changes

    def _log(self, division: SpeedDivision) -> None:
        if self._rank == 0:
            shares = ", ".join(f"{share:.1%}" for share in division.shares)
            speeds = ", ".join(f"{_speed(cost):,.0f}" for cost in division.costs)
            logger.info("local batches change to %s of a global batch; samples per second: %s", shares, speeds)


def _speed(cost: int) -> float:
    """Return samples per second; 0: unknown."""
    return 1e12 / cost if cost else 0.0


def _limits(layout: BatchLayout, ranks: int) -> tuple[int, int, int]:
    """Return the units of a global batch, and the fewest and the most of a rank."""
    units = layout.shards or layout.global_batch_size
    equal = -(-units // ranks)
    least = max(1 if layout.shards else layout.min_local_batch, -(-units // (LEAST_SHARE * ranks)))
    if layout.shards or (layout.max_local_batch is not None and layout.max_local_batch < equal):
        return units, least, units  # a loop body has some of the samples, however many there are
    most = MOST_SHARE * equal
    return units, least, most if layout.max_local_batch is None else min(most, layout.max_local_batch)
