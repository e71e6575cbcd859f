"""Spans of OpenTelemetry: those of a kill and of a checkpoint."""

from __future__ import annotations

import gzip
import time
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp", reason="it needs OpenTelemetry: pip install 'farandole[traces]'")
pytest.importorskip("prometheus_client", reason="it needs prometheus_client: pip install 'farandole[page]'")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from farandole.base.events.event import Event
from farandole.base.events.generation_events import GenerationStarted
from farandole.base.events.job_events import CheckpointSaved
from farandole.integrations.page.recovery_traces import RecoveryTraces
from farandole.job.launch.page_address import check_traces
from tests.support.local_server import LocalServer
from tests.unit.page.test_job_history import Telling, recovered


def spans_of(*events: Event) -> list[ReadableSpan]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    traces, telling = RecoveryTraces(provider, "job"), Telling()
    for event in events:
        told: Any = telling.tell(event)
        traces.on_message("event", told)
    traces.on_message("status", {})
    spans = list(exporter.get_finished_spans())
    traces.close()
    return spans


def ms(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e6


def test_a_recovery_is_a_span_with_its_phases_one_after_the_other() -> None:
    *phases, root = spans_of(GenerationStarted(2, ("w0",), False, 0.0), recovered(2))
    assert (root.name, ms(root), root.status.is_ok) == ("recovery", pytest.approx(30.0), False)
    assert root.end_time == 2 * 10**9  # the event's
    assert root.attributes is not None
    assert root.attributes["farandole.generation"] == 2
    assert root.attributes["farandole.samples_redone"] == 12
    assert [(each.name, round(ms(each))) for each in phases] == [
        ("ready", 5),
        ("connected", 6),
        ("synced", 7),
        ("first_step", 12),
    ]
    at = root.start_time
    for each in phases:
        assert each.parent is not None
        assert each.parent.span_id == root.context.span_id
        assert each.start_time == at
        at = each.end_time


def test_a_planned_change_is_no_error_and_a_checkpoint_is_a_span() -> None:
    from dataclasses import replace

    *_, change, checkpoint = spans_of(
        replace(recovered(3, is_planned=True), lost=()), CheckpointSaved("w0", 10, "step-10", 0.5)
    )
    assert (change.name, change.status.is_ok) == ("change", True)
    assert (checkpoint.name, ms(checkpoint)) == ("checkpoint", pytest.approx(500.0))


def test_an_address_of_a_collector_is_one_of_http() -> None:
    from farandole.errors import ConfigError

    check_traces("")
    check_traces("http://collector:4318/v1/traces")
    with pytest.raises(ConfigError, match=r"must be an address of HTTP.*got 'collector:4317'"):
        check_traces("collector:4317")


def test_spans_reach_a_collector_and_one_that_does_not_answer_holds_nobody_up() -> None:
    posted: list[tuple[str, bytes]] = []

    def take(request: BaseHTTPRequestHandler) -> None:
        posted.append((request.path, request.rfile.read(int(request.headers["Content-Length"]))))
        request.send_response(200)
        request.send_header("Content-Length", "0")
        request.end_headers()

    collector = LocalServer(take)
    collector.start()
    told: Any = Telling().tell(recovered(2))
    try:
        traces = RecoveryTraces.to_collector(f"{collector.url}/v1/traces", "the job")
        traces.on_message("event", told)
        traces.close()
    finally:
        collector.stop()
    ((path, body),) = posted
    assert path == "/v1/traces"
    assert b"first_step" in gzip.decompress(body) if body[:2] == b"\x1f\x8b" else b"first_step" in body
    began_s = time.monotonic()
    traces = RecoveryTraces.to_collector(f"{collector.url}/v1/traces", "the job")
    traces.on_message("event", told)
    traces.close()
    assert time.monotonic() - began_s < 10.0
