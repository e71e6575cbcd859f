"""torch's DistributedDataParallel in elastic jobs: what a kill and a join leave is what one process makes of the same
global batches."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from farandole.testing.proof import Proof
from farandole.testing.running_job import all_training
from tests.support.jobs import SCRIPTS, RunningJob, check_job, farandole

pytestmark = pytest.mark.core

SCRIPT = SCRIPTS / "ddp_elastic_job.py"
COMMIT_SCRIPT = SCRIPTS / "ddp_commit_job.py"


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


job, commit_job = _module(SCRIPT), _module(COMMIT_SCRIPT)

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


def disturbed(
    folder: Path, workers: int, *arguments: str, hosts: Sequence[str] = ()
) -> tuple[Proof, dict[str, dict[str, torch.Tensor]]]:
    """A job whose rank 1 is killed, and replaced: its records, and its parameters by kind."""
    result = folder / "result.pt"
    words = [*arguments, "--epochs", str(EPOCHS), "--slow-below", "3", "--result", str(result)]
    flags = ["-np", str(workers), "--sample-ledger", str(folder / "ledger"), *hosts]
    with RunningJob(flags, SCRIPT, words, folder, folder / "output") as running:
        latest = running.wait_until(all_training(workers), 60)
        running.kill(latest[1]["pid"])
        assert running.wait(60) == 0, (folder / "output").read_text()
    proof = Proof(folder)
    check_job(proof, job.SAMPLES, EPOCHS, workers_at_end=workers)
    assert set(proof.generations().values()) == {workers - 1, workers}
    assert proof.redone() <= 1
    assert proof.steps() == 54
    assert len({end["everything"] for end in proof.ends()}) == 1
    checked = farandole("ledger", "check", str(folder / "ledger"))
    assert checked.stdout.endswith("exactly once: yes\n"), checked.stdout + checked.stderr
    return proof, torch.load(result)


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    return max((ours[key] - value).abs().max().item() for key, value in theirs.items())


@pytest.mark.parametrize(
    ("workers", "arguments"),
    [
        (3, "--kinds plain"),
        (3, "--kinds view unused clip chunks twice hook --max-local-batch 25"),
        (2, "--kinds scaled unused clip --micro-batch-size 4"),
        (2, "--kinds classic --micro-batch-size 4"),
    ],
)
def test_a_kill_and_a_join_leave_what_one_process_makes_of_the_whole_batches(
    tmp_path: Path, workers: int, arguments: str
) -> None:
    proof, ours = disturbed(tmp_path, workers, *arguments.split())
    found = {kind: difference(ours[kind], in_one_process(kind, proof)) for kind in ours}
    assert all(each < 1e-10 for each in found.values()), found


@pytest.mark.long
@pytest.mark.parametrize(
    ("workers", "hosts", "kinds"),
    [
        (2, "localhost:1,127.0.0.1:1", "plain"),
        (3, "localhost:2,127.0.0.1:1", "view"),
        (2, "localhost:1,127.0.0.1:1", "unused clip chunks twice norm"),
    ],
)
def test_between_hosts_buckets_are_reduced_during_backward_and_a_kill_then_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, hosts: str, kinds: str
) -> None:
    """If the step has one optimizer: of several, workers could begin with different ones."""
    monkeypatch.setenv("FARANDOLE_BUCKET_MB", "0.002")  # several, of such a small model
    proof, ours = disturbed(tmp_path, workers, "--kinds", *kinds.split(), hosts=["-H", hosts])
    found = {kind: difference(ours[kind], in_one_process(kind, proof)) for kind in ours if kind != "norm"}
    assert all(each < 1e-10 for each in found.values()), found
    overlapped = (tmp_path / "output").read_text().count("overlapped: True")
    assert overlapped == (workers if len(ours) == 1 else 0)


def test_buffers_are_sent_and_hooks_that_compress_go_on_whoever_comes_or_goes(tmp_path: Path) -> None:
    kinds = ["--kinds", "norm", "power", "fp16"]
    proof, ours = disturbed(tmp_path, 2, *kinds)
    assert all(value.isfinite().all() for state in ours.values() for value in state.values())
    assert ours["norm"]["norm.num_batches_tracked"] >= 54
    assert difference(ours["fp16"], in_one_process("fp16", proof)) < 1e-2
    folder, result = tmp_path / "undisturbed", tmp_path / "undisturbed.pt"
    folder.mkdir()
    words = [*kinds, "--epochs", str(EPOCHS), "--result", str(result)]
    with RunningJob(["-np", "2"], SCRIPT, words, folder, folder / "output") as running:
        assert running.wait(60) == 0, (folder / "output").read_text()
    theirs = torch.load(result)
    assert difference(ours["fp16"], theirs["fp16"]) < 1e-2
    assert loss_of("power", ours) == pytest.approx(loss_of("power", theirs), rel=0.05)


def loss_of(kind: str, values: dict[str, dict[str, torch.Tensor]]) -> float:
    model, table = job.build(kind), job.Table()
    model.load_state_dict(values[kind])
    return float(F.cross_entropy(model(table.x), table.y).detach())


def test_under_the_commit_rule_workers_that_join_have_the_same_buckets(tmp_path: Path) -> None:
    result, steps = tmp_path / "result.pt", 50
    words = ["--steps", str(steps), "--slow-below", "3", "--result", str(result)]
    with RunningJob(["-np", "2"], COMMIT_SCRIPT, words, tmp_path, tmp_path / "output") as running:
        latest = running.wait_until(all_training(2), 60)
        running.kill(latest[0]["pid"])
        assert running.wait(60) == 0, (tmp_path / "output").read_text()
    assert set(Proof(tmp_path).generations().values()) == {1, 2}
    model = commit_job.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        commit_job.loss(model, step).backward()
        optimizer.step()
    assert difference(torch.load(result), dict(model.state_dict())) < 1e-12
