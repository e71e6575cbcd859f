"""Kills while gradients are reduced in the background: nothing is lost, repeated, or different between workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farandole.testing.proof import Proof
from tests.integration.test_elastic_job import SAMPLES, EndlessJob, all_training, beyond
from tests.support.jobs import check_job


@pytest.mark.core
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
    assert ", during backward" in (tmp_path / "output").read_text()


def step_of(latest: dict[int, dict[str, Any]]) -> int:
    return max(record.get("after", record.get("before", 0)) for record in latest.values())


def beyond_step(step: int) -> Callable[[dict[int, dict[str, Any]]], bool]:
    return lambda latest: len(latest) == 3 and step_of(latest) > step


@pytest.mark.long
def test_the_size_of_buckets_is_tried_out_once_whoever_comes_and_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "info")
    flags = ["-np", "3", "--restarts", "9", "--transport", "tcp"]
    with EndlessJob(tmp_path, flags, "--width", "65536") as running:  # 3 MB of gradients
        latest = running.wait_until(all_training(3), 60)
        running.kill(latest[1]["pid"])  # in the middle of the first autotune, most likely
        latest = running.wait_until(beyond(latest[0]["generation"], 3), 60)
        latest = running.wait_until(beyond_step(step_of(latest) + 25), 60)
        running.kill(latest[0]["pid"])
        latest = running.wait_until(beyond(latest[0]["generation"], 3), 60)
        running.wait_until(beyond_step(step_of(latest) + 25), 60)
        running.finish()
    check_job(Proof(tmp_path), samples=SAMPLES, workers_at_end=3)
    said = [line for line in (tmp_path / "output").read_text().splitlines() if "after the autotune" in line]
    said = [line for line in said if line.startswith("[0] ")]  # the last words of those that were killed come again
    assert len(said) == 1, said
    assert said[0].count(" ms with ") == 2
