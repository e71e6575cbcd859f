"""fit() of Lightning as an elastic job: real processes, a real kill, and a worker that joins."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from farandole.testing.proof import Proof
from farandole.testing.running_job import all_training
from tests.scripts.framework_model import EPOCHS, STEPS_PER_EPOCH
from tests.support.framework_jobs import has_stepped, train_with_a_kill_and_a_join
from tests.support.jobs import SCRIPTS, RunningJob, farandole_run

pytestmark = pytest.mark.long

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


def test_the_progress_bar_is_that_of_rank_0_whichever_worker_it_is(tmp_path: Path) -> None:
    words = ["--slow-below", "3", "--folder", str(tmp_path), "--bar", "--sync-dist"]
    with RunningJob(["-np", "2"], SCRIPTS / "lightning_job.py", words, tmp_path, tmp_path / "output") as job:
        latest = job.wait_until(lambda latest: all_training(2)(latest) and has_stepped(latest), 60)
        before = (tmp_path / "output").stat().st_size
        job.kill(latest[0]["pid"])
        assert job.wait(90) == 0, (tmp_path / "output").read_text()
    output = (tmp_path / "output").read_bytes()[before:].decode()
    shown = re.findall(r"Epoch (\d+): +\d+%\|.*?\| *(\d+)/(\d+) \[", output)
    places = [(int(epoch), int(batch)) for epoch, batch, _ in shown]
    assert {int(length) for *_, length in shown} == {STEPS_PER_EPOCH}
    assert places[-1] == (EPOCHS - 1, STEPS_PER_EPOCH)
    assert {epoch for epoch, _ in places} == set(range(places[0][0], EPOCHS))
    assert max(batch for _, batch in places) == STEPS_PER_EPOCH


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
