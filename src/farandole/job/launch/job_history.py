"""The history of one job as its page shows it, from its statuses and events. Pure.

job_feed.py fills it, page_server.py hands it to browsers, and prometheus_metrics.py to Prometheus.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from farandole.base.membership import WorkerTelemetry
from farandole.base.wire.control import EventRecord, Status, WorkerSummary

EVENTS_KEPT = 1000
"""The number of events that a page shows; the coordinator keeps as many."""

GENERATIONS_KEPT = 300
CHECKPOINTS_KEPT = 100

POINTS_KEPT = 720
"""The number of points of a curve. When there are more, every other one is dropped: a curve shows the whole job."""

_RATE_S = 6.0  # seconds over which the rate of steps is taken: it is known up to half a second late

PHASES = ("silent", "ready", "connected", "synced", "first_step")
"""The phases of a recovery, in their order; the fields of Recovered (generation_events.py) without their unit."""

_JobEvent = dict[str, Any]


@dataclass
class Generation:
    """A generation, and the regroup that led to it.

    Attributes:
        at: The time of its start, in seconds since 1970.
        regroup_ms: Milliseconds from the fault, or the plan, to its start.
        phases_ms: Of its recovery, by name; empty before all members have applied a step.
    """

    number: int
    at: float
    workers: tuple[str, ...]
    is_planned: bool = True
    reason: str = ""
    regroup_ms: float = 0.0
    total_ms: float = 0.0
    phases_ms: dict[str, float] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    slowest: str = ""
    noticed: tuple[str, ...] = ()
    steps_redone: int = 0
    samples_redone: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return dict(vars(self))


class Curves:
    """Numbers over time, thinned out so that the number of points stays limited."""

    def __init__(self, most: int = POINTS_KEPT) -> None:
        self._most, self._every, self._skipped = most, 1, 0
        self.at: list[float] = []
        self.columns: dict[str, list[float | None]] = {}

    def add(self, at: float, values: Mapping[str, float | None]) -> bool:
        """Add a point; return whether it was kept."""
        self._skipped += 1
        if self._skipped < self._every:
            return False
        self._skipped = 0
        for name in values.keys() - self.columns.keys():
            self.columns[name] = [None] * len(self.at)
        self.at.append(at)
        for name, column in self.columns.items():
            column.append(values.get(name))
        if len(self.at) > self._most:
            self._every *= 2
            self.at = self.at[::2]
            self.columns = {name: column[::2] for name, column in self.columns.items()}
        return True

    def as_dict(self) -> dict[str, Any]:
        """Return them for JSON."""
        return {"at": self.at, "columns": self.columns}


class JobHistory:
    """The history. `on_status`, `on_event` and `on_contact` return what a page that has the rest needs to know.

    Attributes:
        status: The newest status; None before the first one.
        contact: "connecting", "connected", "lost" (the coordinator does not answer) or "ended".
        counts: The number of events by their name and level; of all events that were seen.
        totals: Counts over the whole job, as far as its events are known.
        recovered: Called with the fields of each Recovered event.
    """

    def __init__(self, job: str = "") -> None:
        self.job = job
        self.status: Status | None = None
        self.contact = "connecting"
        self.newest: tuple[int, int] = (0, 0)  # epoch and number of the newest event
        self.events: deque[_JobEvent] = deque(maxlen=EVENTS_KEPT)
        self.generations: deque[Generation] = deque(maxlen=GENERATIONS_KEPT)
        self.checkpoints: deque[dict[str, Any]] = deque(maxlen=CHECKPOINTS_KEPT)
        self.counts: Counter[tuple[str, str]] = Counter()
        self.recoveries: list[dict[str, Any]] = []  # that have not been taken by the metrics yet
        self.totals = {"lost": 0, "joined": 0, "steps_redone": 0, "samples_redone": 0}
        self.curves = Curves()
        self._members: set[str] = set()
        self._reasons: dict[int, tuple[str, bool]] = {}  # of regroups in progress, by the number of the generation
        self._rates: deque[tuple[float, int]] = deque(maxlen=64)

    # What is told -------------------------------------------------------------------------------------------

    def on_status(self, status: Status, at: float) -> dict[str, Any]:
        """Take the status at a time in seconds since 1970."""
        self.status, self.job = status, status.job
        point = self._point(status, at)
        is_kept = self.curves.add(at, point)
        return {"status": self.status_dict(), "at": at, "point": point if is_kept else None}

    def on_event(self, record: EventRecord, at: float) -> dict[str, Any]:
        """Take an event that happened at a time in seconds since 1970."""
        self.newest = (record.epoch, record.number)
        fields = dict(record.fields)
        name = str(fields.pop("event", ""))
        event = {
            "id": f"{record.epoch}.{record.number}",
            "at": at,
            "level": record.level,
            "name": name,
            "line": record.line,
            "fields": fields,
        }
        self.events.append(event)
        self.counts[name, record.level] += 1
        told: dict[str, Any] = {"event": event}
        if (generation := self._generation_of(name, fields, at)) is not None:
            told["generation"] = generation.as_dict()
        if name in ("CheckpointSaved", "CheckpointFailed"):
            checkpoint = {"at": at, "is_saved": name == "CheckpointSaved", **fields}
            self.checkpoints.append(checkpoint)
            told["checkpoint"] = checkpoint
        if name == "WorkerLost":
            self.totals["lost"] += 1
        return {**told, "totals": dict(self.totals)}

    def on_contact(self, contact: str) -> dict[str, Any]:
        """Note whether the coordinator can be reached."""
        self.contact = contact
        return {"contact": contact}

    # What is shown ------------------------------------------------------------------------------------------

    def as_dict(self, at: float) -> dict[str, Any]:
        """Return everything, for a page that was opened just now."""
        return {
            "job": self.job,
            "at": at,
            "contact": self.contact,
            "status": self.status_dict(),
            "events": list(self.events),
            "generations": [each.as_dict() for each in self.generations],
            "checkpoints": list(self.checkpoints),
            "curves": self.curves.as_dict(),
            "totals": dict(self.totals),
        }

    def status_dict(self) -> dict[str, Any] | None:
        """Return the newest status for a page: short names, and one row for each worker."""
        status = self.status
        if status is None:
            return None
        epoch, trained, samples = epoch_of(status)
        return {
            "state": status.state,
            "generation": status.generation,
            "change": status.change,
            "step": status.step,
            "wanted": status.wanted,
            "spares": status.spares,
            "min": status.min_np,
            "max": status.max_np,
            "regroups": status.regroups,
            "epoch": epoch,
            "trained": trained,
            "samples": samples,
            "workers": [_row(each) for each in (*status.members, *status.newcomers)],
            "hosts": [
                [each.host, each.slots, each.workers, each.is_connected, each.is_drained, round(each.out_for_s, 1)]
                for each in status.hosts
            ],
            "values": means_of_values(status),
            "coordinator": [status.coordinator_pid, status.coordinator_epoch],
        }

    # Conclusions --------------------------------------------------------------------------------------------

    def _point(self, status: Status, at: float) -> dict[str, float | None]:
        measured = [each.telemetry for each in status.members if each.telemetry is not None and each.telemetry.step_s]
        point: dict[str, float | None] = {"workers": len(status.members), "rate": self._rate(status, at)}
        if measured:
            point["step_ms"] = round(1e3 * max(each.step_s for each in measured), 3)
        for name, value in means_of_values(status).items():
            point[f"value:{name}"] = value
        return point

    def _rate(self, status: Status, at: float) -> float | None:
        """Return the steps per second in the last seconds; None: unknown."""
        if status.step is None:
            return None
        if self._rates and status.step < self._rates[-1][1]:
            self._rates.clear()  # the job went back to a checkpoint
        self._rates.append((at, status.step))
        while len(self._rates) > 2 and self._rates[0][0] < at - _RATE_S:
            self._rates.popleft()
        (first_at, first), (last_at, last) = self._rates[0], self._rates[-1]
        return round((last - first) / (last_at - first_at), 3) if last_at > first_at else None

    def _generation_of(self, name: str, fields: Mapping[str, Any], at: float) -> Generation | None:
        """Return the generation that the event has made or completed; None: another event."""
        if name in ("RegroupBegan", "ChangePlanned"):
            self._reasons[fields["number"]] = (str(fields["reason"]), name == "ChangePlanned")
        elif name == "GenerationStarted":
            return self._started(fields, at)
        elif name == "Recovered":
            return self._completed(fields)
        return None

    def _started(self, fields: Mapping[str, Any], at: float) -> Generation:
        number, workers = int(fields["number"]), tuple(fields["workers"])
        reason, is_planned = self._reasons.get(number, ("", True))
        self._reasons.clear()
        joined = tuple(each for each in workers if each not in self._members) if self._members else ()
        lost = tuple(sorted(self._members.difference(workers)))
        generation = Generation(
            number, at, workers, is_planned, reason, 1e3 * float(fields["regroup_s"]), lost=lost, joined=joined
        )
        self.totals["joined"] += len(joined)
        self._members = set(workers)
        self.generations.append(generation)
        return generation

    def _completed(self, fields: Mapping[str, Any]) -> Generation | None:
        self.recoveries.append(dict(fields))
        for redone in ("steps_redone", "samples_redone"):
            self.totals[redone] += int(fields[redone])
        generation = next((each for each in self.generations if each.number == fields["number"]), None)
        if generation is None:
            return None
        generation.total_ms = float(fields["total_ms"])
        generation.phases_ms = {phase: float(fields[f"{phase}_ms"]) for phase in PHASES}
        generation.is_planned, generation.slowest = bool(fields["is_planned"]), str(fields["slowest"])
        generation.reason = str(fields["reason"]) or generation.reason
        generation.noticed = tuple(fields["noticed"])
        generation.steps_redone, generation.samples_redone = int(fields["steps_redone"]), int(fields["samples_redone"])
        return generation


def epoch_of(status: Status) -> tuple[int, int, int]:
    """Return the epoch, its trained samples and all of its samples, as the most advanced member knows them."""
    known = [each.telemetry for each in status.members if each.telemetry is not None]
    return max(((each.epoch, each.trained, each.samples) for each in known), default=(0, 0, 0))


def means_of_values(status: Status) -> dict[str, float]:
    """Return the numbers of state.log(): of each name the mean over the members that have logged it."""
    by_name: dict[str, list[float]] = {}
    for member in status.members:
        for name, value in (member.telemetry.values if member.telemetry is not None else {}).items():
            if math.isfinite(value):  # JSON has no other numbers
                by_name.setdefault(name, []).append(value)
    return {name: math.fsum(values) / len(values) for name, values in by_name.items()}


def _row(worker: WorkerSummary) -> list[Any]:
    """Return a worker as the page's modules expect it (static/model.js, `worker`)."""
    told = worker.telemetry or WorkerTelemetry()
    return [
        worker.worker,
        worker.rank,
        worker.host,
        worker.slot,
        worker.pid,
        worker.state,
        worker.step,
        worker.restarts_left,
        round(1e3 * told.step_s, 2),
        round(1e3 * told.waiting_s, 2),
        told.resident_bytes,
        round(told.cores, 2),
        round(told.share, 4),
    ]
