"""The metrics, and the dashboard that uses them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("prometheus_client", reason="it needs prometheus_client: pip install 'farandole[page]'")

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from farandole.base.events.generation_events import GenerationStarted
from farandole.base.events.job_events import CheckpointSaved
from farandole.base.events.worker_events import WorkerLost
from farandole.base.membership import WorkerTelemetry
from farandole.integrations.page.prometheus_metrics import JobMetrics
from tests.unit.page.test_job_history import Telling, recovered, status

DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana-dashboard.json"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def telling() -> Telling:
    """A history in which everything has happened that metrics tell of."""
    telling = Telling()
    telling.tell(GenerationStarted(1, ("w0", "w1", "w2"), True, 0.0))
    telling.tell(WorkerLost("w1", 1, "was killed", 2))
    telling.tell(GenerationStarted(2, ("w0", "w2", "w3"), False, 0.0))
    telling.tell(recovered(2))
    telling.tell(CheckpointSaved("w0", 10, "step-10", 0.5))
    measured = WorkerTelemetry(0.02, 0.005, 1, 120, 600, 1 << 28, 12.5, 0.9, {"loss": 0.25}, share=0.4, speed=130.0)
    telling.history.on_status(status(telemetry=measured), 5.0)
    telling.history.on_contact("connected")
    return telling


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in parse(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_the_metrics_are_those_of_the_job() -> None:
    text, content_type = JobMetrics(telling().history).render("")
    found = samples(text.decode())
    assert content_type.startswith("text/plain")
    assert ({"state": "trains"}, 2.0) in found["farandole_workers"]
    assert found["farandole_up"] == [({}, 1.0)]
    assert found["farandole_workers_lost_total"] == [({}, 1.0)]
    assert found["farandole_workers_joined_total"] == [({}, 1.0)]
    assert found["farandole_step_seconds"][1] == ({"worker": "w1", "rank": "1", "host": "here"}, 0.02)
    assert found["farandole_worker_cpu_seconds_total"][0][1] == 12.5
    assert found["farandole_worker_share"][0][1] == 0.4
    assert found["farandole_worker_samples_per_second"][0][1] == 130.0
    assert found["farandole_epoch_trained_samples"] == [({}, 120.0)]
    assert found["farandole_value"] == [({"name": "loss"}, 0.25)]
    assert found["farandole_checkpoint_step"] == [({}, 10.0)]
    sums = {labels["phase"]: value for labels, value in found["farandole_recovery_seconds_sum"]}
    assert (sums["total"], sums["ready"], sums["first_step"]) == (0.03, 0.005, 0.012)
    assert {labels["kind"] for labels, _ in found["farandole_recovery_seconds_count"]} == {"fault"}


def test_a_recovery_is_counted_once_however_often_prometheus_asks() -> None:
    metrics = JobMetrics(telling().history)
    for _ in range(3):
        found = samples(metrics.render("")[0].decode())
    assert ({"phase": "total", "kind": "fault"}, 1.0) in found["farandole_recovery_seconds_count"]


def test_it_is_valid_openmetrics_too_also_before_there_is_a_status() -> None:
    for history in (telling().history, Telling().history):
        text, content_type = JobMetrics(history).render(OPENMETRICS)
        assert content_type.startswith("application/openmetrics-text")
        names = {family.name for family in parse_openmetrics(text.decode())}
        assert "farandole_up" in names


def test_names_and_units_follow_the_conventions() -> None:
    for family in parse(JobMetrics(telling().history).render("")[0].decode()):
        assert re.fullmatch(r"farandole_[a-z][a-z_]*", family.name)
        assert family.documentation.endswith("."), family.name
        assert not re.search(r"_(ms|mb|kb|percent|minutes)(_|$)", family.name)


def test_a_name_that_holds_everything_is_escaped() -> None:
    told = telling()
    odd = 'a"b\\c\nd'
    members = tuple(
        msgspec.structs.replace(each, host=odd, telemetry=WorkerTelemetry(0.1, values={odd: 1.0}))
        for each in told.history.status.members  # type: ignore[union-attr]
    )
    told.history.status = msgspec.structs.replace(told.history.status, members=members)
    found = samples(JobMetrics(told.history).render("")[0].decode())
    assert found["farandole_value"] == [({"name": odd}, 1.0)]
    assert found["farandole_step_seconds"][0][0]["host"] == odd


def expressions(node: Any) -> list[str]:
    """All queries of a dashboard."""
    if isinstance(node, dict):
        own = [node["expr"]] if isinstance(node.get("expr"), str) else []
        own += [node["query"]] if isinstance(node.get("query"), str) and "label_values" in node["query"] else []
        return own + [each for value in node.values() for each in expressions(value)]
    return [each for value in node for each in expressions(value)] if isinstance(node, list) else []


def test_the_dashboard_uses_only_metrics_and_labels_that_there_are() -> None:
    found = samples(JobMetrics(telling().history).render("")[0].decode())
    labels = {name: {label for each, _ in values for label in each} for name, values in found.items()}
    queries = expressions(json.loads(DASHBOARD.read_text()))
    assert len(queries) > 10
    for query in queries:
        names = re.findall(r"farandole_\w+", query)
        assert names, query
        assert set(names) <= found.keys(), query
        own = {"job", "instance", "le"}.union(*(labels[name] for name in names))  # Prometheus adds the first two
        for selected in re.findall(r"\{([^}]*)\}", query):
            assert set(re.findall(r"(\w+)\s*[=!]", selected)) <= own, query
        for group in re.findall(r"by\s*\(([^)]*)\)", query):
            assert {each.strip() for each in group.split(",")} <= own, query


def test_the_dashboard_shows_every_metric_that_people_look_at() -> None:
    text = DASHBOARD.read_text()
    for name in (
        "workers",
        "step_seconds",
        "recovery_seconds_bucket",
        "epoch_trained_samples",
        "value",
        "checkpoint_step",
    ):
        assert f"farandole_{name}" in text
