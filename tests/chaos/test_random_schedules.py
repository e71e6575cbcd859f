"""Whole jobs under random kills, leaves and joins: each step trains the samples that it has in a job left in peace."""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from farandole.ledger.check import check
from farandole.ledger.reading import Folder
from farandole.testing.proof import Proof
from farandole.testing.running_job import RunningJob
from tests.chaos.disturbed_job import SCRIPT, DisturbedJob
from tests.jobs import check_job
from tests.pure_order import global_batches
from tests.schedules import draw
from tests.scripts.scheduled_job import BATCH, EPOCHS, SAMPLES, SEED, SLOWER_FROM, STEPS

FIRST, COUNT = int(os.environ.get("CHAOS_SEED", "1000")), int(os.environ.get("CHAOS_SCHEDULES", "100"))


@dataclass(frozen=True)
class Peace:
    """What comes of the job when nothing happens to it."""

    samples_by_step: dict[int, list[tuple[int, int]]]
    weights: list[float]


@pytest.fixture(scope="module")
def peace(tmp_path_factory: pytest.TempPathFactory) -> Peace:
    folder = tmp_path_factory.mktemp("peace")
    (folder / "hurry").touch()
    with RunningJob(["-np", "1"], SCRIPT, ["--hurry", str(folder / "hurry")], folder, folder / "output") as job:
        assert job.wait(60) == 0, (folder / "output").read_text()
    proof = Proof(folder)
    check_job(proof, SAMPLES, EPOCHS, workers_at_end=1)
    assert proof.steps() == STEPS
    return Peace(proof.samples_by_step(), proof.ends()[0]["weights"])


def run_schedule(seed: int, folder: Path, peace: Peace) -> str:
    """Raises AssertionError when the job breaks a promise; else says in a line what happened."""
    schedule = draw(seed, SLOWER_FROM)
    print(schedule)
    print(f"to repeat it: CHAOS_SEED={seed} CHAOS_SCHEDULES=1 {sys.executable} -m pytest -m chaos_long {__file__}")
    job = DisturbedJob(schedule, folder)
    try:
        job.run()
    finally:
        print((folder / "output").read_text()[-6000:])
    proof = Proof(folder)
    check_job(proof, SAMPLES, EPOCHS, workers_at_end=job.staying)
    trained = proof.samples_by_step()
    assert trained.keys() == peace.samples_by_step.keys()
    assert {step: samples for step, samples in trained.items() if samples != peace.samples_by_step[step]} == {}
    for end in proof.ends():
        assert end["seen"] == end["end"]
        assert end["weights"] == pytest.approx(peace.weights, rel=0, abs=1e-10)
    assert proof.redone() <= job.kills, "a kill costs the step in flight at most, a leave or a join none"
    applied = Counter((record["pid"], record["after"]) for record in proof.records if "after" in record)
    assert max(applied.values()) == 1, "nobody does a step again that it has applied"
    if schedule.has_ledger:
        findings = check(Folder(folder / "ledger"))
        assert findings.is_exact, findings
        assert (findings.steps, findings.whole_epochs()) == (STEPS, EPOCHS)
    return f"{schedule}: {len(proof.generations())} generations, {proof.redone()} of {STEPS} steps done again, exact"


def test_each_schedule_has_a_kill_a_leave_and_a_join() -> None:
    for seed in range(FIRST, FIRST + 1000):
        schedule = draw(seed, SLOWER_FROM)
        kinds = {event.kind for event in schedule.events}
        assert "leave" in kinds
        assert kinds & {"kill", "kill two"}
        assert "join" in kinds or (schedule.replaces and "join, killed" in kinds)


def test_a_job_left_in_peace_trains_its_order_one_global_batch_after_the_other(peace: Peace) -> None:
    assert peace.samples_by_step == global_batches(SAMPLES, BATCH, SEED, EPOCHS)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_job_survives_a_random_schedule(seed: int, tmp_path: Path, peace: Peace) -> None:
    run_schedule(seed, tmp_path, peace)


@pytest.mark.chaos_long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_a_job_survives_many_random_schedules(
    seed: int, tmp_path: Path, peace: Peace, capsys: pytest.CaptureFixture[str]
) -> None:
    said = run_schedule(seed, tmp_path, peace)
    with capsys.disabled():
        print(f"\n{said}", end=" ")
