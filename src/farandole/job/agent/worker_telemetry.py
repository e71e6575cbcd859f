"""The measurements of an agent's workers, for the page and for metrics: from their status pages and from the system.
agent.py sends them with a heartbeat.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from farandole.base.liveness.status_reporting import Measured, StatusPage
from farandole.base.membership import WorkerTelemetry

TELEMETRY_EVERY_S = 1.0
"""Shortest time in seconds between two measurements."""

USAGE_EVERY_S = 2.0
"""Shortest time in seconds between two questions to the system about memory and processor time."""

_NS = 1e-9


@dataclass
class _Usage:
    """Memory and processor time of one process. `process` is psutil's; None: it cannot be examined."""

    pid: int
    process: Any
    asked_s: float = 0.0
    resident_bytes: int = 0
    cpu_s: float = 0.0
    cores: float = 0.0


class TelemetryMeter:
    """Measures the workers again and again: durations are those since the call before."""

    def __init__(self) -> None:
        self._before: dict[str, Measured] = {}
        self._step: dict[str, tuple[float, float]] = {}  # mean duration of the last steps, and the waiting in it
        self._usage: dict[str, _Usage] = {}

    def measure(
        self, pages: Mapping[str, StatusPage], pids: Mapping[str, int], now_s: float
    ) -> dict[str, WorkerTelemetry]:
        """Return the measurements of the workers that have a page, by worker. `pids`: their processes."""
        found = {}
        for worker, page in pages.items():
            measured = page.measured()
            step_s, waiting_s = self._step_times(worker, measured)
            usage = self._usage_of(worker, pids[worker], now_s) if worker in pids else _Usage(0, None)
            found[worker] = WorkerTelemetry(
                step_s=step_s,
                waiting_s=waiting_s,
                epoch=measured.epoch,
                trained=measured.trained,
                samples=measured.samples,
                resident_bytes=usage.resident_bytes,
                cpu_s=usage.cpu_s,
                cores=usage.cores,
                values=page.values(),
                share=measured.share_millionths / 1e6,
                speed=measured.samples_per_1000_s / 1e3,
            )
        for worker in self._before.keys() - found.keys():
            del self._before[worker], self._step[worker]
        for worker in self._usage.keys() - found.keys():
            del self._usage[worker]
        return found

    def _step_times(self, worker: str, measured: Measured) -> tuple[float, float]:
        """Return the mean duration of the steps since the call before, and the part of it in which the worker waited.
        Where none has ended since, those of the former call. A regroup is no step: another generation begins anew."""
        before = self._before.get(worker)
        if before is None or measured.generation != before.generation or measured.step < before.step:
            self._before[worker] = measured
            self._step.setdefault(worker, (0.0, 0.0))
        elif (steps := measured.step - before.step) and measured.step_ns > before.step_ns:
            self._before[worker] = measured
            step_s = (measured.step_ns - before.step_ns) * _NS / steps
            waiting_s = (measured.waited_ns - before.waited_ns) * _NS / steps
            self._step[worker] = step_s, min(max(waiting_s, 0.0), step_s)
        return self._step[worker]

    def _usage_of(self, worker: str, pid: int, now_s: float) -> _Usage:
        usage = self._usage.get(worker)
        if usage is None or usage.pid != pid:
            usage = self._usage[worker] = _Usage(pid, _process(pid))
        if usage.process is not None and now_s >= usage.asked_s + USAGE_EVERY_S:
            import psutil

            try:
                times, memory = usage.process.cpu_times(), usage.process.memory_info()
            except (psutil.Error, OSError):  # it has ended
                return usage
            cpu_s = times.user + times.system
            if usage.asked_s:
                usage.cores = max(0.0, cpu_s - usage.cpu_s) / (now_s - usage.asked_s)
            usage.resident_bytes, usage.cpu_s, usage.asked_s = memory.rss, cpu_s, now_s
        return usage


def _process(pid: int) -> Any:
    import psutil  # here: the launcher starts faster without it

    try:
        return psutil.Process(pid)
    except (psutil.Error, OSError):
        return None
