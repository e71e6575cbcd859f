"""Spans of OpenTelemetry for the regroups and checkpoints of a job: a span each, with the phases of a regroup in it.

`farandole page --traces` exports them; the environment variables of OpenTelemetry (OTEL_EXPORTER_OTLP_ENDPOINT and
others) apply.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Status, StatusCode, set_span_in_context

from farandole.job.launch.job_history import PHASES

_FLUSH_MS = 2000
_EXPORT_S = 2.0  # a collector that does not answer must not keep the page from ending
_NS = 1_000_000_000


class RecoveryTraces:
    """The spans of one job: `on_message` for each message of the page's feed, `close` at the end.

    Args:
        provider: Of OpenTelemetry. It is shut down by `close`.
        job: The name of the job.
    """

    def __init__(self, provider: TracerProvider, job: str) -> None:
        self._provider, self._job = provider, job
        self._tracer = provider.get_tracer("farandole")

    @classmethod
    def to_collector(cls, url: str, job: str) -> RecoveryTraces:
        """Return one that exports to a collector of OpenTelemetry over HTTP. `url` empty: as the environment says, or
        http://localhost:4318/v1/traces."""
        provider = TracerProvider(resource=Resource.create({"service.name": "farandole", "farandole.job": job}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url or None, timeout=_EXPORT_S)))
        return cls(provider, job)

    def on_message(self, kind: str, data: Mapping[str, Any]) -> None:
        """Make a span of an event that is the end of something."""
        if kind != "event":
            return
        event = data["event"]
        if event["name"] == "Recovered":
            self._add_regroup(event["fields"], event["at"])
        elif event["name"] == "CheckpointSaved":
            self._add_checkpoint(event["fields"], event["at"])

    def close(self) -> None:
        """Export what is left, with a time limit. It blocks."""
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()

    def _add_regroup(self, fields: Mapping[str, Any], at: float) -> None:
        began_ns = int((at - fields["total_ms"] / 1e3) * _NS)
        attributes = {
            "farandole.job": self._job,
            "farandole.generation": fields["number"],
            "farandole.reason": fields["reason"],
            "farandole.lost": list(fields["lost"]),
            "farandole.noticed": list(fields["noticed"]),
            "farandole.slowest": fields["slowest"],
            "farandole.steps_redone": fields["steps_redone"],
            "farandole.samples_redone": fields["samples_redone"],
        }
        is_change = fields["is_planned"] and not fields["lost"]
        span = self._tracer.start_span(
            "change" if is_change else "recovery", attributes=attributes, start_time=began_ns
        )
        if not is_change:
            span.set_status(Status(StatusCode.ERROR, fields["reason"]))
        inside = set_span_in_context(span)
        for phase in PHASES:
            took_ns = int(fields[f"{phase}_ms"] / 1e3 * _NS)
            if took_ns or phase != "silent":
                child = self._tracer.start_span(phase, context=inside, start_time=began_ns)
                child.end(end_time=began_ns + took_ns)
            began_ns += took_ns
        span.end(end_time=int(at * _NS))

    def _add_checkpoint(self, fields: Mapping[str, Any], at: float) -> None:
        attributes = {
            "farandole.job": self._job,
            "farandole.step": fields["step"],
            "farandole.worker": fields["worker"],
        }
        began_ns = int((at - fields["took_s"]) * _NS)
        self._tracer.start_span("checkpoint", attributes=attributes, start_time=began_ns).end(end_time=int(at * _NS))
