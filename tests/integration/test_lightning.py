"""fit() of Lightning as an elastic job: real processes, a real kill, and a worker that joins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from farandole.ledger.check import check
from farandole.ledger.reading import Folder
from farandole.testing.proof import Proof
from farandole.testing.running_job import RunningJob, all_training
from tests.jobs import SCRIPTS
from tests.scripts.framework_model import EPOCHS, SAMPLES, STEPS_PER_EPOCH, train_plainly

pytest.importorskip("lightning")

STEPS = EPOCHS * STEPS_PER_EPOCH


def train_with_a_kill_and_a_join(folder: Path, script: str, *arguments: str) -> list[dict[str, Any]]:
    """Check all that must hold, whichever trainer it was; what the three workers have written at their ends."""
    flags = ["-np", "3", "--sample-ledger", str(folder / "ledger")]
    words = ["--slow-below", "3", "--folder", str(folder), *arguments]  # the replacement is in the third generation
    with RunningJob(flags, SCRIPTS / script, words, folder, folder / "output") as running:
        latest = running.wait_until(all_training(3), 60)
        running.kill(latest[1]["pid"])
        assert running.wait(90) == 0, (folder / "output").read_text()
    proof = Proof(folder)
    assert list(proof.generations().values()) == [3, 2, 3]
    ledger = check(Folder(folder / "ledger"))
    assert ledger.is_exact
    assert ledger.whole_epochs() == EPOCHS
    assert proof.redone() <= 1
    ends = proof.ends()
    assert {latest[0]["pid"], latest[2]["pid"]} < {end["pid"] for end in ends}
    assert [(end["end"], end["result"], end["epoch"], end["scheduler_last_epoch"]) for end in ends] == [
        (STEPS, STEPS, EPOCHS, STEPS)
    ] * 3
    assert len({end["parameters"] for end in ends}) == 1
    trained = proof.samples_by_step()
    assert sorted(trained) == list(range(STEPS))
    reference = train_plainly([[sample for _, sample in trained[step]] for step in range(STEPS)]).state_dict()
    for name, parameter in torch.load(folder / "result.pt").items():
        assert torch.allclose(parameter, reference[name], rtol=0, atol=1e-10), name
    assert sorted(sample for step in range(STEPS_PER_EPOCH) for _, sample in trained[step]) == list(range(SAMPLES))
    return ends


@pytest.mark.parametrize("extra", [["--micro-batch-size", "4"], ["--sync-dist"]])
def test_fit_survives_a_kill_and_a_join_and_ends_with_the_model_of_one_process(
    tmp_path: Path, extra: list[str]
) -> None:
    """With micro-batches, of which survivors have more than three workers had; and with a collective of the user's,
    in which a fault leaves fit()'s loop."""
    ends = train_with_a_kill_and_a_join(tmp_path, "lightning_job.py", *extra)
    newcomer, *survivors = sorted(ends, key=lambda end: len(end["batches_seen"]))
    in_epoch = list(range(STEPS_PER_EPOCH)) * EPOCHS
    assert all(end["batches_seen"] == in_epoch for end in survivors)  # hooks see a step that is done again once
    assert newcomer["batches_seen"] == in_epoch[-len(newcomer["batches_seen"]) :]
    assert all(end["epochs_ended"] == list(range(EPOCHS)) for end in survivors)
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {
        f"epoch={epoch}-step={STEPS_PER_EPOCH * (epoch + 1)}.ckpt" for epoch in range(EPOCHS)
    }
