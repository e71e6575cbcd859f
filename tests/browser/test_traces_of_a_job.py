"""The spans of a job that is started with --traces, as a collector of OpenTelemetry gets them."""

from __future__ import annotations

import http.server
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

from farandole.testing.running_job import all_training
from tests.support.jobs import ELASTIC_JOB, RunningJob

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="it needs OpenTelemetry: make test-page")
pytest.importorskip("aiohttp", reason="it needs aiohttp: pip install 'farandole[page]'")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

DEADLINE_S = 60


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes spans. `spans` has all of them."""

    spans: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        self.spans.extend(span for each in request.resource_spans for scope in each.scope_spans for span in scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def test_a_collector_gets_a_span_of_each_recovery_with_its_phases(tmp_path: Path) -> None:
    words = ["--epochs", "1000000", "--stop", str(tmp_path / "stop"), "--item-ms", "0.3"]
    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        flags = ["-np", "2", "--page=127.0.0.1:0", f"--traces={url}"]
        with RunningJob(flags, ELASTIC_JOB, words, tmp_path, tmp_path / "output") as job:
            latest = job.wait_until(all_training(2), DEADLINE_S)
            job.kill(latest[1]["pid"])
            job.wait_until(all_training(2), DEADLINE_S)
            (tmp_path / "stop").touch()
            assert job.wait(DEADLINE_S) == 0, (tmp_path / "output").read_text()
        collector.shutdown()
    recoveries = [span for span in Collector.spans if span.name == "recovery"]
    assert recoveries, [span.name for span in Collector.spans]
    inside = {span.name for span in Collector.spans if span.parent_span_id == recoveries[0].span_id}
    assert inside == {"ready", "connected", "synced", "first_step"}
