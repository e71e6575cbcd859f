"""Ratios of times that were measured in turns, with the interval in which their middle is with a probability of 95 %
(bootstrap)."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple

_TRIMMED = 0.2
_RESAMPLES = 2000


class Ratio(NamedTuple):
    """A ratio, and the limits of its interval."""

    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.4f} [{self.low:.4f}, {self.high:.4f}]"


def ratio_of(ratios: Sequence[float], seed: int = 0) -> Ratio:
    """Return the mean of the ratios without the highest and the lowest fifth of them, as a geometric one, with its
    interval."""
    logs, draw = [math.log(each) for each in ratios], random.Random(seed)
    means = sorted(_trimmed_mean(draw.choices(logs, k=len(logs))) for _ in range(_RESAMPLES))
    low, high = means[round(0.025 * _RESAMPLES)], means[round(0.975 * _RESAMPLES) - 1]
    return Ratio(math.exp(low), math.exp(_trimmed_mean(logs)), math.exp(high))


def _trimmed_mean(values: Sequence[float]) -> float:
    left_out = int(_TRIMMED * len(values))
    return statistics.fmean(sorted(values)[left_out : len(values) - left_out])
