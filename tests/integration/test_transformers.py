"""train() of transformers as an elastic job: real processes, a real kill, and a worker that joins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts.framework_model import EPOCHS, STEPS_PER_EPOCH
from tests.support.framework_jobs import train_with_a_kill_and_a_join

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
