"""The division of global batches among workers of unequal speed. Pure.

Every worker computes the same division from the same measurements, which they exchange in each step. So all numbers are
whole ones: sums of floats differ between versions of Python.

A worker's *cost* is the time that it takes for a sample, in picoseconds, without waiting for others. The division is
the one in which the slowest worker needs the least time. It changes seldom: costs are means over many steps, and a
change has to be worth it. Only where a worker's last few steps all differ from those before, these alone count.

A *unit* is what a division counts: a sample, or, in strict mode, a shard.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Iterable, Sequence
from math import isqrt
from typing import NamedTuple, TypeAlias

Counts: TypeAlias = tuple[int, ...]
"""The units of each rank in a whole global batch, by rank; empty: equally many for all."""

WINDOW = 32
"""Number of newest steps whose mean is a worker's cost."""

RECENT = 3
"""Number of steps in a row that show a change of a worker's speed."""

SETTLED = 5
"""Fewest steps of a division before the next one, unless a worker's speed has changed."""

LEAST_SHARE = 10
"""A worker gets no less than one part in so many of an equal share: else it could not be measured."""

MOST_SHARE = 2
"""A local batch that one loop body computes is at most so many times as large as an equal one: it needs memory."""

_CHANGE_PERCENT = 20  # least difference of the recent steps from those before them
_GAIN_PERCENT = 5  # least gain of a new division, in the time of the slowest worker, where times do not vary
_MOST_ERROR_PERCENT = 10  # most that is added to it where times vary
_EVEN_PERCENT = 3  # an equal division that costs at most so much more is preferred
_MEMORY = 2 * SETTLED  # a division that takes back the one before it within so many steps goes half of the way


def even_counts(units: int, ranks: int) -> Counts:
    """Return the division into equal parts."""
    return tuple((rank + 1) * units // ranks - rank * units // ranks for rank in range(ranks))


def slowest(counts: Sequence[int], costs: Sequence[int]) -> int:
    """Return the time of the slowest rank, in picoseconds, where units are samples."""
    return max(count * cost for count, cost in zip(counts, costs, strict=True))


def divide_by_cost(units: int, costs: Sequence[int], least: int, most: int) -> Counts:
    """Return the division in which the slowest rank needs the least time. `costs`: of a unit on each rank, positive;
    `least`, `most`: fewest and most units of a rank, of which so many exist together."""

    def within(time: int) -> list[int]:
        """Return the most units that each rank can compute in this time, within the limits."""
        return [min(max(time // cost, least), most) for cost in costs]

    low, high = 0, units * max(costs)  # the longest time in which the ranks compute at most `units`
    while low < high:
        middle = (low + high + 1) // 2
        if sum(within(middle)) <= units:
            low = middle
        else:
            high = middle - 1
    counts = within(low)
    for rank in sorted(range(len(costs)), key=lambda rank: ((counts[rank] + 1) * costs[rank], rank)):
        if sum(counts) < units and counts[rank] < most:
            counts[rank] += 1
    return tuple(counts)


def halfway(one: Counts, other: Counts) -> Counts:
    """Return a division between two others."""
    sums = list(map(operator.add, one, other))
    bounds = [bound // 2 for bound in itertools.accumulate(sums, initial=0)]
    return tuple(stop - start for start, stop in itertools.pairwise(bounds))


def mean_speed_cost(costs: Iterable[int]) -> int:
    """Return the cost of a worker that has the mean speed of those with these costs; 0 where none is known."""
    known = [cost for cost in costs if cost]
    return len(known) * _ONE // sum(_ONE // cost for cost in known) if known else 0


_ONE = 1 << 96


class CostWindow:
    """The costs that were measured on one worker in its newest steps. `cost`: known from before; 0: unknown."""

    def __init__(self, cost: int = 0) -> None:
        self._costs: deque[int] = deque([cost] * RECENT if cost else (), maxlen=WINDOW)

    def __len__(self) -> int:
        return len(self._costs)

    @property
    def cost(self) -> int:
        """The mean, without the largest and the smallest of them: a single step that took long changes nothing. 0:
        unknown."""
        if len(self._costs) < RECENT:
            return 0
        return max(1, (sum(self._costs) - max(self._costs) - min(self._costs)) // (len(self._costs) - 2))

    @property
    def error_percent(self) -> int:
        """The standard error of `cost`, in percent of it."""
        number, mean = len(self._costs), sum(self._costs) // len(self._costs)
        deviation = sum(abs(cost - mean) for cost in self._costs) * 5 // (4 * number)  # 5/4: as a standard deviation
        return 100 * deviation // (mean * isqrt(number) or 1)

    @property
    def may_change(self) -> bool:
        """True when the newest measurement may be the first of a change, or chance."""
        cost, newest = self.cost, self._costs[-1]
        return not cost * 100 <= newest * (100 + _CHANGE_PERCENT) <= cost * (100 + _CHANGE_PERCENT) ** 2 // 100

    def add(self, cost: int) -> bool:
        """Add a measurement. Return whether it shows a change of speed; then only the newest ones count."""
        self._costs.append(cost)
        recent, before = list(self._costs)[-RECENT:], sorted(list(self._costs)[:-RECENT])
        if len(before) < RECENT:
            return False
        few = len(before) // 10  # of the steps before, some took longer, or less long, by chance
        median = before[len(before) // 2]
        is_slower = min(recent) > before[-1 - few] and min(recent) * 100 > median * (100 + _CHANGE_PERCENT)
        is_faster = max(recent) < before[few] and max(recent) * (100 + _CHANGE_PERCENT) < median * 100
        if is_slower or is_faster:
            self._costs = deque(recent, maxlen=WINDOW)
        return is_slower or is_faster


class SpeedDivision:
    """The division of one generation's global batches. It changes with measurements only.

    counts  the newest division, which may not be in use yet
    """

    def __init__(self, units: int, least: int, most: int, costs: Sequence[int], delay: int = 0) -> None:
        """Divide `units` among ranks with these last known costs (0: unknown), each at least `least` where there are so
        many, and at most `most`. `delay`: steps after which a division comes into use: batches are fetched before."""
        self._units, self._delay = units, delay
        self._even = even_counts(units, len(costs))
        self._most = max(most, max(self._even))
        self._least = min(least, min(self._even))
        typical = mean_speed_cost(costs)
        self._windows = [CostWindow(cost) for cost in costs]
        self._is_due = 0 in costs  # the speed of a worker has changed, or becomes known
        self._steps = 0  # of the newest division; below 0: not in use yet
        self._moves: Counts = ()  # by how much the newest division differs from the one before it
        self.counts: Counts = ()
        if typical and self._least:
            self.counts = self._better([cost or typical for cost in costs], 0)

    @property
    def costs(self) -> list[int]:
        """The cost of each rank, by rank; 0: unknown."""
        return [window.cost for window in self._windows]

    @property
    def shares(self) -> list[float]:
        """The part of a global batch that each rank has, by rank."""
        return [count / self._units for count in self.counts or self._even]

    def measured(self, samples: Sequence[int], own_ns: Sequence[int]) -> bool:
        """Note a step: the samples of each rank, and the time that it took for them without waiting for others, in
        nanoseconds (0: unknown). Return whether the division changes."""
        self._steps += 1
        for window, count, time_ns in zip(self._windows, samples, own_ns, strict=True):
            if count and time_ns:
                self._is_due |= window.add(time_ns * 1000 // count)
        costs = self.costs
        if 0 in costs or not self._least:
            return False
        if self._is_due:
            is_early = self._steps < RECENT
        else:
            is_early = self._steps < SETTLED or any(window.may_change for window in self._windows)
        if is_early:
            return False
        error_percent = max(window.error_percent for window in self._windows)
        better = self._better(costs, min(error_percent if self._is_due else 2 * error_percent, _MOST_ERROR_PERCENT))
        self._is_due = False
        if better == self.counts:
            return False
        self._moves = tuple(map(operator.sub, better or self._even, self.counts or self._even))
        self.counts, self._steps = better, -self._delay
        return True

    def _better(self, costs: Sequence[int], error_percent: int) -> Counts:
        """Return a division that is worth a change; else the present one."""
        now = self.counts or self._even
        best = self._preferred(divide_by_cost(self._units, costs, self._least, self._most), costs)
        if slowest(now, costs) * 100 < slowest(best, costs) * (100 + _GAIN_PERCENT + error_percent):
            return self.counts
        if self._steps < _MEMORY and sum(map(operator.mul, self._moves, map(operator.sub, best, now))) < 0:
            best = self._preferred(halfway(now, best), costs)
        return () if best == self._even else best

    def _preferred(self, counts: Counts, costs: Sequence[int]) -> Counts:
        """Return the even division, unless the other one is clearly better."""
        is_even = slowest(self._even, costs) * 100 <= slowest(counts, costs) * (100 + _EVEN_PERCENT)
        return self._even if is_even else counts


STRAGGLER_PERCENT = 50
"""A worker whose speed stays below so many percent of the others' median is a straggler."""

NO_STRAGGLER_PERCENT = 60
"""A straggler is none any more when its speed is so many percent of the others' median."""

STRAGGLER_STEPS = 20
"""Number of steps in a row after which a slow worker is a straggler."""


class Straggler(NamedTuple):
    """A worker that has become a straggler, or is none any more. `percent`: its speed, of the others' median."""

    rank: int
    percent: int
    is_slow: bool


class Stragglers:
    """The workers that stay slow: their speed is below half of the others' for many steps in a row."""

    def __init__(self, ranks: int) -> None:
        self._slow_steps = [0] * ranks
        self._reported: set[int] = set()

    def update(self, costs: Sequence[int]) -> list[Straggler]:
        """Note the costs after a step. Return the ranks that have become stragglers, or are none any more."""
        changes: list[Straggler] = []
        for rank, cost in enumerate(costs):
            others = sorted(each for place, each in enumerate(costs) if place != rank and each)
            if not others or not cost:
                continue
            percent = 100 * others[(len(others) - 1) // 2] // cost
            self._slow_steps[rank] = self._slow_steps[rank] + 1 if percent < STRAGGLER_PERCENT else 0
            if rank not in self._reported and self._slow_steps[rank] >= STRAGGLER_STEPS:
                self._reported.add(rank)
                changes.append(Straggler(rank, percent, is_slow=True))
            elif rank in self._reported and percent >= NO_STRAGGLER_PERCENT:
                self._reported.remove(rank)
                changes.append(Straggler(rank, percent, is_slow=False))
        return changes
