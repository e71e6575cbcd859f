"""Kills while gradients are reduced in the background: nothing is lost, repeated, or different between workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.testing.proof import Proof
from tests.integration.test_elastic_job import SAMPLES, EndlessJob, all_training, beyond
from tests.jobs import check_job


def test_workers_may_die_while_gradients_are_reduced_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARANDOLE_BUCKET_MB", "0.0001")  # also of the smallest model several
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "info")
    with EndlessJob(tmp_path, ["-np", "3", "--restarts", "9", "--transport", "tcp"]) as running:
        latest = running.wait_until(all_training(3), 60)
        for rank in (1, 0):
            generation = latest[0]["generation"]
            running.kill(latest[rank]["pid"])
            latest = running.wait_until(beyond(generation, 3), 60)
        running.finish()
    proof = Proof(tmp_path)
    check_job(proof, samples=SAMPLES, workers_at_end=3)
    assert proof.redone() <= 2
    assert "reduced while backward goes on" in (tmp_path / "output").read_text()
