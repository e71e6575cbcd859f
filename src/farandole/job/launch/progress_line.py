"""The text of the progress line: epoch, step, rate, workers, the last recovery and the time left. Pure.

report.py fills it from summaries and events of the job, and terminal_line.py draws as much of it as fits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from farandole.base.events.event import Event, count
from farandole.base.events.generation_events import Recovered
from farandole.job.coordinator.control_requests import JobSummary

RATE_S = 10.0
"""Seconds over which the rate is taken, unless there are fewer than two points in them."""

_SEPARATOR = " | "
_SHOWN_STATES = ("regrouping", "finishing", "ending")


class Part(NamedTuple):
    """A part of the line. Of a line that is too long for its terminal the parts with the highest `rank` go first."""

    rank: int
    text: str


class Rate:
    """The rate of a counter that only grows: `add` it whenever it is looked at."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, float]] = deque()

    def add(self, at_s: float, count: float) -> None:
        """Note the counter at a time. A counter that has become smaller begins anew."""
        points = self._points
        if points and count < points[-1][1]:
            points.clear()
        if not points or count > points[-1][1]:
            points.append((at_s, count))
        while len(points) > 2 and points[1][0] <= at_s - RATE_S:
            points.popleft()

    def per_s(self, now_s: float) -> float | None:
        """Return the rate; None: unknown. It falls when the counter does not change for longer than usual."""
        points = self._points
        if len(points) < 2:
            return None
        (first_s, first), (last_s, last) = points[0], points[-1]
        usual_s = (last_s - first_s) / (len(points) - 1)
        until_s = max(last_s, now_s - 2 * usual_s)
        return (last - first) / (until_s - first_s)


class ProgressLine:
    """The line of one job that has begun at `began_s`."""

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._summary: JobSummary | None = None
        self._samples, self._steps = Rate(), Rate()
        self._former_epochs = 0  # samples of the epochs that were seen to their end
        self._recovery = ""

    def on_event(self, event: Event) -> None:
        """Note the duration of a recovery, or of a planned change."""
        if isinstance(event, Recovered):
            verb = "changed" if event.is_planned and not event.lost else "recovered"
            took = f"{event.total_ms:.0f} ms" if event.total_ms < 10_000 else f"{event.total_ms / 1000:.1f} s"
            self._recovery = f"{verb} in {took}"

    def on_summary(self, summary: JobSummary, now_s: float) -> None:
        """Take a summary of the job at this time."""
        former, self._summary = self._summary, summary
        if summary.step is not None:
            self._steps.add(now_s, summary.step)
        if former is not None and summary.epoch != former.epoch:
            if summary.epoch > former.epoch and former.samples:
                self._former_epochs += former.samples * (summary.epoch - former.epoch)
            else:
                self._former_epochs, self._samples = 0, Rate()
        if summary.trained:
            self._samples.add(now_s, self._former_epochs + summary.trained)

    def parts(self, now_s: float) -> tuple[Part, ...]:
        """Return the parts of the line, in their order; empty before the first summary."""
        summary = self._summary
        if summary is None:
            return ()
        samples_per_s, steps_per_s = self._samples.per_s(now_s), self._steps.per_s(now_s)
        parts = [Part(7, "[farandole]")]
        if summary.state in _SHOWN_STATES:
            parts.append(Part(0, summary.state))
        if summary.samples:
            parts.append(Part(1, f"epoch {summary.epoch}: {summary.trained / summary.samples:.0%}"))
            if samples_per_s:
                left_s = (summary.samples - summary.trained) / samples_per_s
                parts.append(Part(5, f"{duration(left_s)} left in it"))
        elif summary.epoch:
            parts.append(Part(1, f"epoch {summary.epoch}"))
        if summary.step is None:
            parts.append(Part(1, duration(now_s - self._began_s)))
        else:
            parts.append(Part(2, f"step {summary.step:,}"))
        if samples_per_s is not None:
            parts.append(Part(4, f"{_rate(samples_per_s)} samples/s"))
        elif steps_per_s is not None:
            parts.append(Part(4, f"{_rate(steps_per_s)} steps/s"))
        parts.append(Part(3, _workers(summary)))
        if self._recovery:
            parts.append(Part(6, self._recovery))
        return tuple(parts)


def fitted(parts: Sequence[Part], columns: int) -> str:
    """Return the parts as one line of at most so many columns. Where not even the most important part fits, its
    beginning."""
    left = list(parts)
    while len(left) > 1 and len(_joined(left)) > columns:
        left.remove(max(left))
    return _joined(left)[: max(0, columns)]


def duration(seconds: float) -> str:
    """Format a duration: `0:07`, `12:03`, `3:00:00`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _joined(parts: Sequence[Part]) -> str:
    """Join the parts; the name in front is no value, and has no separator after it."""
    texts = [part.text for part in parts]
    if texts and texts[0].startswith("["):
        return " ".join(filter(None, (texts[0], _SEPARATOR.join(texts[1:]))))
    return _SEPARATOR.join(texts)


def _workers(summary: JobSummary) -> str:
    if summary.members != summary.wanted:
        return f"{summary.members} of {summary.wanted} workers"
    return count(summary.members, "worker")


def _rate(per_s: float) -> str:
    if per_s >= 100:
        return f"{per_s:,.0f}"
    return f"{per_s:.1f}" if per_s >= 1 else f"{per_s:.2f}"
