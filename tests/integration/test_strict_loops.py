"""Strict mode with loops as people write them: the same bits in every world, or an error in every world."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.support.jobs import SCRIPTS, farandole_run, run_alone

pytestmark = pytest.mark.long

SCRIPT = SCRIPTS / "strict_loops_job.py"


def results(output: str) -> set[tuple[str, float]]:
    """The hash of each worker, and the figure of its loop."""
    found = re.findall(r"rank \d+ of \d+: ([0-9a-f]{64}) after 6 steps, figure (\S+)", output)
    return {(state_hash, float(figure)) for state_hash, figure in found}


def run_job(*arguments: str, flags: tuple[str, ...] = ("-np", "2")) -> subprocess.CompletedProcess[str]:
    return farandole_run("-q", *flags, sys.executable, str(SCRIPT), *arguments, timeout_s=120.0)


def results_of_job(*arguments: str, flags: tuple[str, ...] = ("-np", "2")) -> set[tuple[str, float]]:
    done = run_job(*arguments, flags=flags)
    assert done.returncode == 0, done.stdout + done.stderr
    return results(done.stdout)


@cache
def result_alone(*arguments: str) -> tuple[str, float]:
    """The result of a single process without a launcher."""
    done = run_alone(SCRIPT, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = results(done.stdout)
    return found


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_statistics_are_added_up_while_buckets_are_reduced_in_the_background(transport: str) -> None:
    arguments = ("--loop", "ManyBuckets")
    found = results_of_job(*arguments, "--audit", "1", flags=("-np", "2", "--transport", transport))
    assert found == {result_alone(*arguments)}


@pytest.mark.parametrize("shards", ["2", "4"])
@pytest.mark.parametrize("loop", ["SkippedLoss", "DroppedGradients", "DroppedGradientsOfOne", "ClampedWeights"])
def test_these_loops_train_the_same_bits_in_every_world(loop: str, shards: str) -> None:
    arguments = ("--loop", loop, "--shards", shards)
    assert results_of_job(*arguments) == {result_alone(*arguments)}


@pytest.mark.parametrize("shards", ["4", "8"])
@pytest.mark.parametrize(
    "loop", ["WithoutStatistics", "WeighedLoss", "SummedLoss", "ChangedGradients", "HalfPrecision"]
)
def test_gradients_are_those_of_the_global_batch_however_it_is_cut(loop: str, shards: str) -> None:
    """The last global batch of an epoch has shards of unequal sizes if there are 8."""
    arguments = ("--loop", loop, "--shards", shards)
    found = result_alone(*arguments)
    assert results_of_job(*arguments, flags=("-np", "3")) == {found}
    _, whole = result_alone("--loop", loop, "--shards", "1")
    assert found[1] == pytest.approx(whole, abs=2e-2 if loop == "HalfPrecision" else 2e-4)


def test_a_loop_body_without_a_backward_pass_leaves_the_statistics_of_its_forward_pass() -> None:
    assert result_alone("--loop", "SkippedLoss", "--shards", "4")[1] > 0.1


@pytest.mark.parametrize("shards", ["2", "4"])
def test_a_loss_that_depends_on_the_step_of_another_optimizer_is_refused_alone_too(shards: str) -> None:
    done = run_alone(SCRIPT, "--loop", "Gan", "--shards", shards)
    assert done.returncode != 0
    assert "a second backward pass for the same batch, in strict mode" in done.stderr


@pytest.mark.parametrize("shards", ["2", "4"])
@pytest.mark.parametrize(
    "loop", ["SchedulerInBody", "AverageInBody", "TeacherInBody", "NoiseOnWeights", "CountingLayer"]
)
def test_a_run_of_the_loop_body_without_a_step_leaves_nothing_behind(loop: str, shards: str) -> None:
    """In a world of one a step has as many of them as there are shards, less one. With a rehearsal in a world in which
    there are none, what the loop body changes is known, too, when a worker is lost."""
    arguments = ("--loop", loop, "--shards", shards)
    found = result_alone(*arguments)
    is_exact = loop in ("SchedulerInBody", "CountingLayer")
    assert found[1] == pytest.approx(result_alone("--loop", loop, "--shards", "1")[1], abs=0.0 if is_exact else 0.1)
    assert results_of_job(*arguments) == {found}
    assert results_of_job(*arguments, "--lost-at", "3", flags=("-np", "2", "--restarts", "0")) == {found}


@pytest.mark.parametrize("loop", ["LateAverage", "LateAverageUnseen"])
def test_a_change_that_comes_late_and_cannot_be_taken_back_is_named(loop: str) -> None:
    done = run_job("--loop", loop, "--shards", "4")
    assert done.returncode != 0
    named = r"strict mode: state\.average\.module\.\d\.\w+( and \d more)? changed in a run of the loop body whose"
    assert re.search(named, done.stderr)


def test_a_loss_may_depend_on_the_epoch_when_a_worker_is_lost_behind_its_batches() -> None:
    assert len(results_of_job("--loop", "LossOfEpoch")) == 1


def test_the_hash_at_the_end_of_an_epoch_is_that_of_the_mended_state(tmp_path: Path) -> None:
    found = []
    for loop in ("Loop", "ChangedWeight"):
        events = tmp_path / loop
        results_of_job("--loop", loop, flags=("-np", "3", "--events", str(events)))
        lines = map(json.loads, events.read_text().splitlines())
        found.append([each["hash"] for each in lines if each["event"] == "StateHash"])
    assert len(found[0]) == 2
    assert found[1] == found[0]
