"""The hosts of a job on a Ray cluster, from what `ray.nodes()` returns."""

from __future__ import annotations

from typing import Any

import pytest

from farandole.integrations.ray.ray_engine import RaySettings, hosts_of, name_of, slots_of
from farandole.job.engines.host_list import HostSlots


def node(number: int, is_alive: bool = True, **resources: float) -> dict[str, Any]:
    """Return a node as ray 2.60 describes it."""
    return {
        "NodeID": f"{number:08x}" + 48 * "0",
        "Alive": is_alive,
        "NodeManagerHostname": "gpu",
        "NodeManagerAddress": "10.0.0.1",
        "Resources": {"memory": 1e9, "node:10.0.0.1": 1.0, **resources},
    }


def test_nodes_of_one_machine_have_different_names() -> None:
    assert [name_of(node(1)), name_of(node(2))] == ["gpu-00000001", "gpu-00000002"]
    assert name_of(node(3) | {"NodeManagerHostname": ""}) == "10.0.0.1-00000003"


@pytest.mark.parametrize(
    ("settings", "slots"),
    [
        (RaySettings(), 8),
        (RaySettings(cpus_per_worker=3), 2),
        (RaySettings(cpus_per_worker=0.5), 16),
        (RaySettings(cpus_per_worker=9), 0),
        (RaySettings(gpus_per_worker=1), 2),
        (RaySettings(gpus_per_worker=0.5, most_per_node=3), 3),
    ],
)
def test_a_node_has_room_for_as_many_workers_as_its_scarcest_resource(settings: RaySettings, slots: int) -> None:
    assert slots_of(node(1, CPU=8.0, GPU=2.0), settings) == slots


def test_dead_nodes_nodes_without_cpus_and_nodes_that_are_drained_are_no_hosts() -> None:
    nodes = [node(1, CPU=2.0), node(2), node(3, is_alive=False, CPU=2.0), node(4, CPU=2.0)]
    assert hosts_of(nodes, RaySettings(), {nodes[3]["NodeID"]}) == (HostSlots("gpu-00000001", 2),)


def test_a_job_keeps_its_nodes_and_takes_no_more_than_it_needs() -> None:
    nodes = [node(1, CPU=2.0), node(2, CPU=2.0), node(3, CPU=2.0)]
    settings = RaySettings(most_slots=3)
    assert hosts_of(nodes, settings, set()) == (HostSlots("gpu-00000001", 2), HostSlots("gpu-00000002", 1))
    known = ("gpu-00000003", "gpu-00000002", "gpu-00000009")
    assert hosts_of(nodes, settings, set(), known) == (HostSlots("gpu-00000003", 2), HostSlots("gpu-00000002", 1))
