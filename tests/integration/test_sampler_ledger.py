"""The sample ledger of real jobs under the commit rule: workers die with samples that were not committed, or not even
recorded; the loop over the loader is left and begun again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import SCRIPTS, farandole, farandole_run

SAMPLES, EPOCHS = 101, 3


def job(folder: Path, *words: str, workers: int = 3) -> tuple[str, dict[str, Any]]:
    """What the workers said on stderr, and what its ledger proves. Each --kill has to come about."""
    killed, ledger = folder / "killed", folder / "ledger"
    killed.mkdir()
    flags = ["-np", str(workers), "--sample-ledger", str(ledger), sys.executable, str(SCRIPTS / "sampler_job.py")]
    done = farandole_run(*flags, "--killed", str(killed), *words)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in killed.iterdir()) == sorted(
        words[i + 1] for i, w in enumerate(words) if w == "--kill"
    )
    checked = farandole("ledger", "check", "--json", str(ledger))
    found = json.loads(checked.stdout)
    assert checked.returncode == (0 if found["is_exact"] else 1)
    return done.stderr, found


@pytest.mark.core
@pytest.mark.parametrize("how", [[], ["--indices"]])
def test_what_is_committed_counts_and_what_is_rolled_back_does_not(tmp_path: Path, how: list[str]) -> None:
    """Two die with a batch that is trained and not recorded: one that the others roll back, too, and one right before
    they commit it."""
    _, found = job(tmp_path, "--kill", "before-record:0:2", "--kill", "before-record:1:3", *how)
    assert found["is_exact"], found
    assert [epoch["end"] for epoch in found["epochs"]] == [SAMPLES] * EPOCHS
    assert found["generations"] >= 3
    assert found["redone"] > 0
    assert all(epoch["padding"] <= 2 for epoch in found["epochs"])
    assert found["epochs"][0]["padding"] or found["epochs"][2]["padding"], "101 samples for 3, 2 or 1 ranks"


@pytest.mark.long
def test_in_torchdatas_loader_with_loader_processes_too(tmp_path: Path) -> None:
    _, found = job(tmp_path, "--kill", "before-record:0:2", "--kill", "before-record:1:3", "--stateful")
    assert found["is_exact"], found
    assert [epoch["end"] for epoch in found["epochs"]] == [SAMPLES] * EPOCHS


def test_a_loop_that_is_left_and_begun_again_after_a_reset_goes_on_with_the_rest_whoever_dies(tmp_path: Path) -> None:
    said, found = job(tmp_path, "--after-break", "reset", "--kill", "evaluated:0:5", "--kill", "after-break:1:5")
    assert found["is_exact"], found
    assert [epoch["end"] for epoch in found["epochs"]] == [SAMPLES] * EPOCHS
    assert "a second time" not in said


def test_a_loop_that_is_left_and_begun_again_without_one_repeats_samples_says_so_and_loses_none(tmp_path: Path) -> None:
    said, found = job(tmp_path, "--after-break", "nothing", "--kill", "evaluated:0:5", workers=2)
    assert "samples of this epoch are recorded a second time" in said
    assert "sampler.reset()" in said
    assert not found["is_exact"]
    assert all(epoch["lost"] == [] for epoch in found["epochs"])
    assert all(0 < len(epoch["repeated"]) <= 40 for epoch in found["epochs"]), "what was trained before break"
