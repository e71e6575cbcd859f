"""The triggers of faults, from the job's events and its workers' records (step_records.py)."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farandole.testing.faults.fault_plan import After, AtLastStepOf, AtStep, Trigger

Latest = Mapping[int, Mapping[str, Any]]
"""By rank, the last record of each worker of the newest generation."""

_SAID = {
    "start": re.compile(rb"\[farandole\] starting w"),
    "join": re.compile(rb"\[farandole\] generation \d+ is planned"),
    "regroup": re.compile(rb"\[farandole\] regrouping for generation"),
    "sync": re.compile(rb"\[farandole\] generation \d+ starts"),
}


class Triggers:
    """Detects triggers.

    output           of the job, which has to report all its events (--verbose)
    steps_per_epoch  of the job
    """

    def __init__(self, output: Path, steps_per_epoch: int) -> None:
        self._output, self._steps_per_epoch = output, steps_per_epoch
        self._place, self._since = 0, time.monotonic()

    def begin(self) -> None:
        """Mark the time of a fault: the next trigger counts only after it."""
        self._place, self._since = self._output.stat().st_size, time.monotonic()

    def step_of(self, trigger: Trigger) -> int | None:
        if isinstance(trigger, AtStep):
            return trigger.step
        if isinstance(trigger, AtLastStepOf):
            return (trigger.epoch + 1) * self._steps_per_epoch - 1
        return None

    def has_come(self, trigger: Trigger, latest: Latest) -> bool:
        step = self.step_of(trigger)
        if step is not None:
            return farthest(latest) >= step
        if isinstance(trigger, After):
            return time.monotonic() >= self._since + trigger.delay_s
        assert not isinstance(trigger, AtStep | AtLastStepOf)
        with self._output.open("rb") as output:
            output.seek(self._place)
            return _SAID[trigger.phase].search(output.read()) is not None


def farthest(latest: Latest) -> int:
    """Return the last step that some worker has begun or applied; -1 before the first."""
    return max((progress(record) for record in latest.values()), default=-1)


def progress(record: Mapping[str, Any]) -> int:
    """Return the last step that a worker has begun or applied."""
    return int(record.get("before", record.get("after", record.get("end", 0))))
