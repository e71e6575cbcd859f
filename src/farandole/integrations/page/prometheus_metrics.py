"""The metrics of a job for Prometheus, from its history. page_server.py serves them at /metrics.

Names and units follow https://prometheus.io/docs/practices/naming/. Counters begin with the oldest event that the
coordinator still kept when the page was started.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from farandole.base.wire.control import Status, WorkerSummary
from farandole.job.launch.job_history import PHASES, JobHistory, epoch_of, means_of_values

RECOVERY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class JobMetrics:
    """The metrics of one job: `render()` for each request."""

    def __init__(self, history: JobHistory) -> None:
        self._history = history
        self._registry = CollectorRegistry()
        self._recoveries = Histogram(
            "farandole_recovery_seconds",
            "Duration of a regroup and of its phases, until all members have applied a step again.",
            ("phase", "kind"),
            buckets=RECOVERY_BUCKETS_S,
            registry=self._registry,
        )
        self._registry.register(_JobCollector(history))

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics, and their content type. `accept` is the header of the request: Prometheus asks for its
        OpenMetrics format."""
        recoveries, self._history.recoveries = self._history.recoveries, []
        for each in recoveries:
            kind = "planned" if each["is_planned"] else "fault"
            self._recoveries.labels("total", kind).observe(each["total_ms"] / 1e3)
            for phase in PHASES:
                self._recoveries.labels(phase, kind).observe(each[f"{phase}_ms"] / 1e3)
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _JobCollector:
    """The metrics that are the same each time they are asked for."""

    def __init__(self, history: JobHistory) -> None:
        self._history = history

    def collect(self) -> Iterator[Metric]:
        history = self._history
        yield InfoMetricFamily("farandole_job", "The job.", value={"id": history.job})
        up = history.contact == "connected"
        yield GaugeMetricFamily("farandole_up", "1 while the coordinator answers.", value=float(up))
        if history.status is not None:
            yield from _of_job(history.status)
            yield from _of_workers([*history.status.members, *history.status.newcomers])
        yield from self._of_events()

    def _of_events(self) -> Iterator[Metric]:
        history = self._history
        for name, text, total in (
            ("farandole_workers_lost", "Workers that were lost.", "lost"),
            ("farandole_workers_joined", "Workers that joined a generation after the first one.", "joined"),
            ("farandole_steps_redone", "Steps that were begun and repeated.", "steps_redone"),
            ("farandole_samples_redone", "Samples of repeated steps.", "samples_redone"),
        ):
            yield CounterMetricFamily(name, text, value=history.totals[total])
        events = CounterMetricFamily("farandole_events", "Events of the job.", labels=("event", "level"))
        for (event, level), count in history.counts.items():
            events.add_metric((event, level), count)
        yield events
        checkpoints = CounterMetricFamily("farandole_checkpoints", "Checkpoints.", labels=("result",))
        saved = [each for each in history.checkpoints if each["is_saved"]]
        checkpoints.add_metric(("saved",), history.counts["CheckpointSaved", "info"])
        checkpoints.add_metric(("failed",), history.counts["CheckpointFailed", "warning"])
        yield checkpoints
        if saved:
            for name, text, field in (
                ("farandole_checkpoint_step", "Decided steps in the newest checkpoint.", "step"),
                ("farandole_checkpoint_seconds", "Duration of the newest checkpoint.", "took_s"),
                ("farandole_checkpoint_timestamp_seconds", "Unix time of the newest checkpoint.", "at"),
            ):
                yield GaugeMetricFamily(name, text, value=saved[-1][field])


def _of_job(status: Status) -> Iterator[Metric]:
    workers = GaugeMetricFamily("farandole_workers", "Workers by state.", labels=("state",))
    states = Counts(each.state for each in (*status.members, *status.newcomers))
    for state in ("trains", "leaves", "has finished", "fails", "starts", "waits", "ends"):
        workers.add_metric((state,), states[state])
    yield workers
    epoch, trained, samples = epoch_of(status)
    for name, text, value in (
        ("farandole_workers_wanted", "Workers that the job should have.", status.wanted),
        ("farandole_slots", "Slots of the hosts that may be used.", _usable_slots(status)),
        ("farandole_generation", "Number of the generation.", status.generation),
        ("farandole_epoch", "Number of the epoch, from 0.", epoch),
        ("farandole_epoch_trained_samples", "Samples of the epoch that were trained, each once.", trained),
        ("farandole_epoch_samples", "Samples of the epoch; 0: unknown.", samples),
        ("farandole_step", "Decided steps; they decrease when a job goes back to a checkpoint.", status.step or 0),
        ("farandole_coordinator_epoch", "Number of the coordinator's starts.", status.coordinator_epoch),
    ):
        yield GaugeMetricFamily(name, text, value=value)
    yield CounterMetricFamily("farandole_regroups", "Generations after the first one.", value=status.regroups)
    values = GaugeMetricFamily("farandole_value", "Numbers of state.log(), mean over the members.", labels=("name",))
    for name, mean in means_of_values(status).items():
        values.add_metric((name,), mean)
    yield values


def _usable_slots(status: Status) -> int:
    return sum(each.slots for each in status.hosts if not (each.is_drained or each.out_for_s))


def _of_workers(workers: list[WorkerSummary]) -> Iterator[Metric]:
    labels = ("worker", "rank", "host")
    gauge, counter = partial(GaugeMetricFamily, labels=labels), partial(CounterMetricFamily, labels=labels)
    step = gauge("farandole_step_seconds", "Mean duration of the last steps.")
    waiting = gauge("farandole_step_waiting_seconds", "Part of a step in which a worker waits for others.")
    memory = gauge("farandole_worker_resident_memory_bytes", "Memory of a worker's process.")
    cpu = counter("farandole_worker_cpu_seconds", "Processor time of a worker's process.")
    share = gauge("farandole_worker_share", "Part of a global batch that a worker has, with balance.")
    speed = gauge("farandole_worker_samples_per_second", "Speed of a worker in its own time, with balance.")
    for each in workers:
        if (told := each.telemetry) is None:
            continue
        worker = (each.worker, "" if each.rank is None else str(each.rank), each.host)
        if told.step_s:
            step.add_metric(worker, told.step_s)
            waiting.add_metric(worker, told.waiting_s)
        if told.resident_bytes:
            memory.add_metric(worker, told.resident_bytes)
            cpu.add_metric(worker, told.cpu_s)
        if told.share:
            share.add_metric(worker, told.share)
            speed.add_metric(worker, told.speed)
    yield from (step, waiting, memory, cpu, share, speed)
