"""A cloud announces that a machine will be taken away: its agent leaves in order, and nothing is redone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farandole.testing.proof import Proof
from farandole.testing.running_job import all_training
from tests.support.jobs import check_job
from tests.support.joined import JoinedJob
from tests.support.metadata_services import MetadataService, aws, azure, azure_event, gcp

LONG_S = 60.0

CLOUDS = {
    "aws": (aws, {"action": {"action": "terminate", "time": "2017-09-18T08:22:00Z"}}),
    "gcp": (gcp, {"preempted": "TRUE"}),
    "azure": (azure, {"events": [azure_event("Preempt")]}),
}


@pytest.mark.parametrize("cloud", sorted(CLOUDS))
def test_an_agent_leaves_and_no_step_is_redone(cloud: str, tmp_path: Path) -> None:
    make, notice = CLOUDS[cloud]
    events_file = tmp_path / "events"
    with (
        make() as service,
        JoinedJob(tmp_path, ["-np", "2", "--local-slots", "1", "--events", str(events_file)]) as job,
    ):
        with job.agent("--preemption", f"{cloud}={service.url}", "--left-exit-code", "143") as agent:
            job.running.wait_until(all_training(2), LONG_S)
            service.set(**notice)
            assert agent.wait() == 143
            job.running.wait_until(all_training(1), LONG_S)
        assert job.stop() == 0
    check_job(Proof(job.records), 600)
    events = [json.loads(line) for line in events_file.read_text().splitlines()]
    assert [event["steps_redone"] for event in events if event["event"] == "Recovered"][-1] == 0
    assert [event["host"] for event in events if event["event"] == "HostDrained"] == ["b"]
    assert not [event for event in events if event["event"] in ("WorkerLost", "AgentWasLost")]


def test_a_service_that_hangs_disturbs_neither_the_agent_nor_its_end(tmp_path: Path) -> None:
    with aws() as service, JoinedJob(tmp_path, ["-np", "2", "--local-slots", "1"]) as job:
        service.trouble = "hang"
        with job.agent("--preemption", f"aws={service.url}") as agent:
            job.running.wait_until(all_training(2), LONG_S)
            assert job.stop() == 0
            assert agent.wait() == 0
    check_job(Proof(job.records), 600)


def test_a_notice_for_the_machine_of_the_coordinator_ends_the_job_with_a_checkpoint(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    with aws() as service:
        flags = ["-np", "2", "--preemption", f"aws={service.url}", "--checkpoint", str(place)]
        with JoinedJob(tmp_path, flags) as job:
            job.running.wait_until(all_training(2), LONG_S)
            _interrupt(service)
            assert job.running.wait(LONG_S) == 130
            said = job.said()
    assert "AWS: the spot instance will terminate" in said
    assert any(place.rglob("*.safetensors")), said


def _interrupt(service: MetadataService) -> None:
    service.set(**CLOUDS["aws"][1])
