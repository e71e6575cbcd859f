"""The dashboard's file in Grafana's own models of dashboards, panels and queries. Grafana itself is no package of a
registry; tests/browser/test_real_prometheus.py asks a real Prometheus for each query.
"""

from __future__ import annotations

import enum
import json
import types
import typing
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("grafana_foundation_sdk", reason="it needs grafana-foundation-sdk: make test-page")
pytest.importorskip("prometheus_client", reason="it needs prometheus_client: pip install 'farandole[page]'")

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import dashboard as models

from tests.unit.page.test_prometheus_metrics import DASHBOARD

# Of the Prometheus plugin (packages/grafana-prometheus/src/annotations.ts), which the model of annotations leaves out.
OF_THE_PLUGIN = {"annotations.list.0.titleFormat"}


def lost(given: Any, kept: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of what a model has not kept as it was."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for name, value in given.items():
            yield from lost(value, kept[name], f"{path}.{name}") if name in kept else [f"{path}.{name}"]
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for index, (value, other) in enumerate(zip(given, kept, strict=True)):
            yield from lost(value, other, f"{path}.{index}")
    elif given != kept:
        yield path


def wrong_choices(value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of texts that are none of those which Grafana knows there."""
    if isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from wrong_choices(each, f"{path}.{index}")
        return
    if not type(value).__module__.startswith("grafana_foundation_sdk"):
        return
    for name, hint in typing.get_type_hints(type(value)).items():
        own = getattr(value, name)
        choices = hint.__args__ if isinstance(hint, types.UnionType) or typing.get_origin(hint) else (hint,)
        kinds = [each for each in choices if isinstance(each, type) and issubclass(each, enum.Enum)]
        if own is not None and kinds and not any(own in [each.value for each in kind] for kind in kinds):
            yield f"{path}.{name}={own}"
        yield from wrong_choices(own, f"{path}.{name}")


def test_grafana_knows_every_part_of_the_dashboard() -> None:
    register_default_plugins()
    given = json.loads(DASHBOARD.read_text())
    dashboard = models.Dashboard.from_json(given)
    kept = json.loads(JSONEncoder().encode(dashboard))
    assert {path.removeprefix(".") for path in lost(given, kept)} <= OF_THE_PLUGIN
    assert list(wrong_choices(dashboard)) == []
    for panel in dashboard.panels:  # each has a model of its own, so its options were checked, too
        assert panel.type_val == "row" or type(panel.options).__module__.endswith(f".{panel.type_val}"), panel.title
    numbers = [panel.id_val for panel in dashboard.panels]
    assert len(numbers) == len(set(numbers))
    places = [panel.grid_pos for panel in dashboard.panels]
    for index, one in enumerate(places):
        assert one.x + one.w <= 24, "wider than Grafana's grid"
        for other in places[:index]:
            is_beside = one.x + one.w <= other.x or other.x + other.w <= one.x
            assert is_beside or one.y + one.h <= other.y or other.y + other.h <= one.y, "panels that lie on each other"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"options": {"colorMod": "value"}}, "panels.0.options.colorMod"),
        ({"options": {"colorMode": "colour"}}, ".panels.0.options.color_mode=colour"),
    ],
)
def test_a_mistake_in_the_dashboard_is_found(change: dict[str, Any], found: str) -> None:
    register_default_plugins()
    given = json.loads(DASHBOARD.read_text())
    given["panels"][0] |= change
    dashboard = models.Dashboard.from_json(given)
    kept = json.loads(JSONEncoder().encode(dashboard))
    mistakes = {path.removeprefix(".") for path in lost(given, kept)} | set(wrong_choices(dashboard))
    assert found in mistakes - OF_THE_PLUGIN
