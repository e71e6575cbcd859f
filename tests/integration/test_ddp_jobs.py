"""torch's DistributedDataParallel in elastic jobs: what a kill and a join leave is what one process makes of the same
global batches."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from farandole.testing.proof import Proof
from farandole.testing.running_job import RunningJob, all_training
from tests.jobs import SCRIPTS, check_job

SCRIPT = SCRIPTS / "ddp_elastic_job.py"
_spec = importlib.util.spec_from_file_location("ddp_elastic_job", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
job: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(job)

EPOCHS = 6  # 54 steps, the last one of each epoch with 10 samples instead of 25


def in_one_process(kind: str, proof: Proof) -> dict[str, torch.Tensor]:
    """Parameters after the same steps on whole batches, without anything of Farandole."""
    model, table = job.build(kind), job.Table()
    optimizer = torch.optim.SGD(model.parameters(), lr=job.LR, momentum=job.MOMENTUM)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, gamma=0.8)
    for samples in proof.samples_by_step().values():
        ids = [sample for _, sample in samples]
        optimizer.zero_grad()
        F.cross_entropy(model(table.x[ids]), table.y[ids]).backward()
        if kind == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.CLIP)
        optimizer.step()
        scheduler.step()
    return dict(model.state_dict())


def disturbed(folder: Path, *arguments: str) -> tuple[Proof, dict[str, dict[str, torch.Tensor]]]:
    """A job of three whose rank 1 is killed, and replaced: its records, and its parameters by kind."""
    result = folder / "result.pt"
    words = [*arguments, "--epochs", str(EPOCHS), "--slow-below", "3", "--result", str(result)]
    with RunningJob(["-np", "3"], SCRIPT, words, folder, folder / "output") as running:
        latest = running.wait_until(all_training(3), 60)
        running.kill(latest[1]["pid"])
        assert running.wait(60) == 0, (folder / "output").read_text()
    proof = Proof(folder)
    check_job(proof, job.SAMPLES, EPOCHS, workers_at_end=3)
    assert set(proof.generations().values()) == {2, 3}
    assert proof.redone() <= 1
    assert proof.steps() == 54
    assert len({end["everything"] for end in proof.ends()}) == 1
    return proof, torch.load(result)


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    return max((ours[key] - value).abs().max().item() for key, value in theirs.items())


@pytest.mark.parametrize(
    "arguments",
    [
        "--kinds plain",
        "--kinds view unused clip chunks twice hook --max-local-batch 25",
        "--kinds scaled unused clip --micro-batch-size 4",
        "--kinds classic --micro-batch-size 4",
    ],
)
def test_a_kill_and_a_join_leave_what_one_process_makes_of_the_whole_batches(tmp_path: Path, arguments: str) -> None:
    proof, ours = disturbed(tmp_path, *arguments.split())
    found = {kind: difference(ours[kind], in_one_process(kind, proof)) for kind in ours}
    assert all(each < 1e-10 for each in found.values()), found


def test_buffers_are_sent_and_hooks_that_compress_go_on_whoever_comes_or_goes(tmp_path: Path) -> None:
    _, ours = disturbed(tmp_path, "--kinds", "norm", "power", "fp16")
    assert all(value.isfinite().all() for state in ours.values() for value in state.values())
    assert ours["norm"]["norm.num_batches_tracked"] >= 54

