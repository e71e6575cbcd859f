"""What must hold for a job with a trainer of somebody else's in which a worker is killed and another one joins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from farandole.testing.proof import Proof
from farandole.testing.running_job import all_training
from farandole.training.ledger.check import check
from farandole.training.ledger.proving import Folder
from tests.scripts.framework_model import EPOCHS, SAMPLES, STEPS_PER_EPOCH, train_plainly
from tests.support.jobs import SCRIPTS, RunningJob

STEPS = EPOCHS * STEPS_PER_EPOCH


def train_with_a_kill_and_a_join(folder: Path, script: str, size: int, *arguments: str) -> list[dict[str, Any]]:
    """Check all that must hold, whichever trainer it was; what the workers have written at their ends."""
    flags = ["-np", str(size), "--sample-ledger", str(folder / "ledger")]
    words = ["--slow-below", "3", "--folder", str(folder), *arguments]  # the replacement is in the third generation
    with RunningJob(flags, SCRIPTS / script, words, folder, folder / "output") as running:
        latest = running.wait_until(lambda latest: all_training(size)(latest) and has_stepped(latest), 60)
        running.kill(latest[1]["pid"])
        assert running.wait(90) == 0, (folder / "output").read_text()
    proof = Proof(folder)
    assert [workers for _, workers in sorted(proof.generations().items())] == [size, size - 1, size]
    ledger = check(Folder(folder / "ledger"))
    assert ledger.is_exact
    assert ledger.whole_epochs() == EPOCHS
    assert proof.redone() <= 1
    ends = proof.ends()
    assert {latest[rank]["pid"] for rank in latest if rank != 1} < {end["pid"] for end in ends}
    assert [(end["end"], end["result"], end["epoch"], end["scheduler_last_epoch"]) for end in ends] == [
        (STEPS, STEPS, EPOCHS, STEPS)
    ] * size
    assert len({end["parameters"] for end in ends}) == 1
    trained = proof.samples_by_step()
    assert sorted(trained) == list(range(STEPS))
    reference = train_plainly([[sample for _, sample in trained[step]] for step in range(STEPS)]).state_dict()
    for name, parameter in torch.load(folder / "result.pt").items():
        assert torch.allclose(parameter, reference[name], rtol=0, atol=1e-10), name
    assert sorted(sample for step in range(STEPS_PER_EPOCH) for _, sample in trained[step]) == list(range(SAMPLES))
    return ends


def has_stepped(latest: dict[int, dict[str, Any]]) -> bool:
    """Whether each worker has begun three steps."""
    return all(record.get("before", 0) >= 3 for record in latest.values())
