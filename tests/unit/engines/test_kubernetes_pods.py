"""What the object of a pod says about the agent in it, without a cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from farandole.integrations.kubernetes.kubernetes_pods import PodBook, PodEnd, agent_of_pod, judge_pod
from farandole.job.engines.engine_interface import HostReports
from farandole.job.launch.cli import main


def pod(name: str = "a", uid: str = "1", policy: str = "Never", deleted: bool = False, **status: Any) -> dict[str, Any]:
    metadata = {"name": name, "uid": uid, "resourceVersion": "1"}
    if deleted:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return {"metadata": metadata, "spec": {"restartPolicy": policy}, "status": {"phase": "Running", **status}}


RUNNING = {"state": {"running": {}}}
KILLED = {"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}


@pytest.mark.parametrize(
    ("thing", "end"),
    [
        (pod(), PodEnd()),
        (pod(phase="Pending"), PodEnd()),
        (pod(containerStatuses=[RUNNING]), PodEnd()),
        (pod(containerStatuses=[KILLED, RUNNING]), PodEnd()),  # a container beside the agent's may run on
        (pod(deleted=True), PodEnd(leaving="its pod is being deleted")),
        (
            pod(containerStatuses=[KILLED]),
            PodEnd(gone="its pod has ended: OOMKilled (exit code 137)", are_workers_gone=True),
        ),
        (pod(policy="OnFailure", containerStatuses=[KILLED]), PodEnd()),  # it is started again, or has been
        (
            pod(phase="Failed", containerStatuses=[KILLED], deleted=True),
            PodEnd(gone="its pod has ended: OOMKilled (exit code 137)", are_workers_gone=True),
        ),
        # Set by the control plane for a node that is lost: nobody knows about its processes.
        (pod(phase="Failed", reason="NodeLost"), PodEnd(gone="its pod has ended: NodeLost")),
        (
            pod(phase="Failed", reason="Evicted", containerStatuses=[RUNNING]),
            PodEnd(gone="its pod has ended: Evicted"),
        ),
        (
            pod(conditions=[{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}]),
            PodEnd(leaving="its pod is evicted: PreemptionByScheduler"),
        ),
        (pod(conditions=[{"type": "Ready", "status": "True"}]), PodEnd()),
        ({"metadata": {"name": "a", "uid": "1"}}, PodEnd()),
    ],
)
def test_the_end_of_a_pod_is_read_from_its_object(thing: dict[str, Any], end: PodEnd) -> None:
    assert judge_pod(thing) == end


def test_each_end_is_reported_once_and_by_uid() -> None:
    reports: list[tuple[object, ...]] = []
    book = PodBook(HostReports(lambda *report: reports.append(report), lambda *report: reports.append(report)))
    book.listed([pod(), pod("b", "2")])
    book.changed(pod(deleted=True))
    book.listed([pod(deleted=True), pod("b", "2")])
    book.changed(pod(containerStatuses=[KILLED], deleted=True))
    book.deleted(pod(containerStatuses=[KILLED], deleted=True))
    book.listed([pod("a", "3")])
    assert reports == [
        ("a/1", "its pod is being deleted"),
        ("a/1", "its pod has ended: OOMKilled (exit code 137)", True),
        ("b/2", "its pod does not exist any more", False),
    ]


def test_the_name_of_an_agent_tells_pods_of_the_same_name_apart() -> None:
    assert agent_of_pod(pod("a", "1")) == "a/1"


def test_without_the_library_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes_asyncio", None)
    words = ["run", "-np", "2", "--kubernetes", "app=train", "--token-file", str(tmp_path / "token"), "true"]
    assert main(words) == 2
    assert "pip install 'farandole[kubernetes]'" in capsys.readouterr().err
