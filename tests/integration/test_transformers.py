"""train() of transformers as an elastic job: real processes, a real kill, and a worker that joins."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from farandole.testing.proof import Proof
from farandole.testing.running_job import all_training
from tests.scripts.framework_model import EPOCHS, STEPS_PER_EPOCH
from tests.support.framework_jobs import has_stepped, train_with_a_kill_and_a_join
from tests.support.jobs import SCRIPTS, RunningJob, farandole_run

pytestmark = pytest.mark.long

pytest.importorskip("transformers")


def test_train_survives_a_kill_and_a_join_and_ends_with_the_model_of_one_process(tmp_path: Path) -> None:
    """With micro-batches, of which survivors have more than two workers had."""
    ends = train_with_a_kill_and_a_join(tmp_path, "transformers_job.py", 2, "--micro-batch-size", "4")
    every_step = [(step + 1) / STEPS_PER_EPOCH for step in range(EPOCHS * STEPS_PER_EPOCH)]
    newcomer, *survivors = sorted(ends, key=lambda end: len(end["epochs"]))
    assert all(end["epochs"] == pytest.approx(every_step) for end in survivors)  # each step was seen once
    assert newcomer["epochs"] == pytest.approx(every_step[-len(newcomer["epochs"]) :])
    assert len({end["best"] for end in ends}) == 1
    saved = {path.name for path in (tmp_path / "saved").iterdir()}
    assert saved == {f"checkpoint-{STEPS_PER_EPOCH * (epoch + 1)}" for epoch in range(EPOCHS)}


def test_the_progress_bar_counts_steps_also_of_the_next_rank_0(tmp_path: Path) -> None:
    words = ["--slow-below", "3", "--folder", str(tmp_path)]
    with RunningJob(["-np", "2"], SCRIPTS / "transformers_job.py", words, tmp_path, tmp_path / "output") as job:
        latest = job.wait_until(lambda latest: all_training(2)(latest) and has_stepped(latest), 60)
        job.kill(latest[0]["pid"])
        assert job.wait(90) == 0, (tmp_path / "output").read_text()
    steps = EPOCHS * STEPS_PER_EPOCH
    shown = re.findall(rf"\|\s*(\d+)/{steps} \[", (tmp_path / "output").read_text())
    counts = [int(each) for each in shown]
    bars = [index for index, each in enumerate(counts) if index == 0 or each < counts[index - 1]]
    assert len(bars) <= 2, counts  # the second one may begin with the step that was repeated
    assert (counts[0], counts[-1], max(counts)) == (0, steps, steps), counts


def test_all_workers_end_with_the_best_model_when_rank_0_is_killed_while_it_is_written(tmp_path: Path) -> None:
    """With `train_dataset`, bf16 and `load_best_model_at_end`; the best model is that of the second of four epochs."""
    script = (sys.executable, str(SCRIPTS / "transformers_settings_job.py"), "--folder", str(tmp_path))
    job = farandole_run("-np", "2", *script, timeout_s=110)
    assert job.returncode == 0, job.stderr
    assert (tmp_path / "killed").exists()
    ends = Proof(tmp_path).ends()
    best = tmp_path / f"checkpoint-{2 * STEPS_PER_EPOCH}"
    assert {(end["end"], end["best"], end["computed_with"]) for end in ends} == {
        (EPOCHS * STEPS_PER_EPOCH, str(best), "torch.bfloat16")
    }
    assert len({end["parameters"] for end in ends}) == 1
    assert load_file(best / "model.safetensors")["net.0.weight"].flatten()[:5].tolist() == ends[0]["first"]
    complete = {path.parent.name for path in tmp_path.glob("checkpoint-*/trainer_state.json")}
    assert complete == {f"checkpoint-{STEPS_PER_EPOCH * (epoch + 1)}" for epoch in range(EPOCHS)}
