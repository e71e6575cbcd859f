"""fit() of Lightning as an elastic job: real processes, a real kill, and a worker that joins."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from farandole.testing.proof import Proof
from tests.scripts.framework_model import EPOCHS, STEPS_PER_EPOCH
from tests.support.framework_jobs import train_with_a_kill_and_a_join
from tests.support.jobs import SCRIPTS, farandole_run

pytest.importorskip("lightning")


def test_fit_survives_a_kill_and_a_join_and_ends_with_the_model_of_one_process(tmp_path: Path) -> None:
    """With micro-batches, of which the survivor has more than two workers had, and with a collective of the user's in
    each, in which the fault leaves the loop of fit()."""
    ends = train_with_a_kill_and_a_join(tmp_path, "lightning_job.py", 2, "--micro-batch-size", "4", "--sync-dist")
    newcomer, *survivors = sorted(ends, key=lambda end: len(end["batches_seen"]))
    in_epoch = list(range(STEPS_PER_EPOCH)) * EPOCHS
    assert all(end["batches_seen"] == in_epoch for end in survivors)  # hooks see a step that is done again once
    assert newcomer["batches_seen"] == in_epoch[-len(newcomer["batches_seen"]) :]
    assert all(end["epochs_ended"] == list(range(EPOCHS)) for end in survivors)
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {
        f"epoch={epoch}-step={STEPS_PER_EPOCH * (epoch + 1)}.ckpt" for epoch in range(EPOCHS)
    }


def test_a_scheduler_made_for_the_estimated_steps_sees_all_of_them(tmp_path: Path) -> None:
    """Lightning's usual recipe asks for the number of steps in configure_optimizers(), before fit() begins to train. In
    mixed precision, whose roundings must be the same on all workers."""
    script = (sys.executable, str(SCRIPTS / "lightning_job.py"), "--one-cycle", "--micro-batch-size", "2", "--bfloat16")
    folders = ("--folder", str(tmp_path), "--records", str(tmp_path))
    job = farandole_run("-np", "3", *script, "--max-epochs", "2", "--max-steps", "17", *folders, timeout_s=180)
    assert job.returncode == 0, job.stderr
    ends = Proof(tmp_path).ends()
    assert [(end["estimated"], end["result"], end["scheduler_last_epoch"]) for end in ends] == [(17, 17, 17)] * 3
    assert len({end["parameters"] for end in ends}) == 1
    assert {end["computed_with"] for end in ends} == {"torch.bfloat16"}
