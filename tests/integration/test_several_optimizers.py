"""Jobs with several optimizers: real processes, killed between the steps of two of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.support.jobs import SCRIPTS, farandole, farandole_run, run_alone

pytestmark = pytest.mark.long


WGAN = SCRIPTS / "wgan_job.py"


def test_a_generator_that_steps_for_every_third_batch_trains_the_same_whoever_dies(tmp_path: Path) -> None:
    """A worker dies when only the critic has stepped, in a body of its own and before the generator; one after both."""
    killed, ledger = tmp_path / "killed", tmp_path / "ledger"
    killed.mkdir()
    run_alone(WGAN, "--result", str(tmp_path / "alone")).check_returncode()
    flags = ["-np", "4", "--restarts", "0", "--sample-ledger", str(ledger)]
    done = farandole_run(
        *flags, sys.executable, str(WGAN), "--result", str(tmp_path / "together"), "--killed", str(killed)
    )
    assert done.returncode == 0, done.stderr
    assert len(list(killed.iterdir())) == 3, done.stderr
    alone, together = (torch.load(tmp_path / name) for name in ("alone", "together"))
    assert together["steps"] == alone["steps"] == 19
    assert together["made"] == alone["made"] == {"generator": 7, "critic": 19}
    for ours, theirs in zip(alone["tensors"], together["tensors"], strict=True):
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-10)
    checked = farandole("ledger", "check", str(ledger))
    assert checked.returncode == 0, checked.stdout
    assert "2 whole epochs of 62 samples" in checked.stdout
