"""Models that are divided by FSDP2, with replicas: a worker is killed in the middle of a step and replaced; and what
becomes of a job in which nobody else had its shard."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from farandole.testing.running_job import FARANDOLE_RUN
from tests.jobs import SCRIPTS, farandole_run, processes_with

EXAMPLE = Path(__file__).parents[2] / "examples" / "hybrid_sharding" / "train.py"


def one_process(images: torch.Tensor, labels: torch.Tensor, batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same model, trained on the whole batches."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 99), torch.nn.LayerNorm(99), torch.nn.Tanh(), torch.nn.Linear(99, 10)]
    model = torch.nn.Sequential(*layers).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def check_equal(saved: Path, expected: dict[str, torch.Tensor]) -> None:
    found = torch.load(saved)
    assert set(found) == set(expected)
    for name, parameter in expected.items():
        assert torch.allclose(found[name], parameter, rtol=0, atol=1e-10), name


def test_a_killed_worker_is_replaced_and_the_parameters_are_those_of_one_process(tmp_path: Path) -> None:
    saved = tmp_path / "parameters.pt"
    done = farandole_run(
        *("-np", "4", sys.executable, str(SCRIPTS / "sharded_job.py")), *("--save", str(saved), "--kill", "backward")
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    entered: list[dict[str, Any]] = [json.loads(line) for line in re.findall(r"\{.*\}", done.stdout)]
    worlds = {(each["batch"], each["size"], each["replicas"], each["shards"]) for each in entered}
    # Whole on three workers in between, from the two shards that the killed one's replica left.
    assert worlds == {(0, 4, 2, 2), (10, 3, 3, 1), (25, 4, 2, 2)}
    generator = torch.Generator().manual_seed(1)
    images, labels = (
        torch.rand(480, 64, generator=generator).double(),
        torch.randint(0, 10, (480,), generator=generator),
    )
    check_equal(saved, one_process(images, labels, [torch.arange(48) + step * 48 % 480 for step in range(50)]))


@contextmanager
def job_without_replica(folder: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """The example on two workers with a shard each; one is killed after the first epoch."""
    command = [*FARANDOLE_RUN, "-np", "2", "--restarts", "0", sys.executable, str(EXAMPLE), *words]
    with (folder / "output").open("wb") as output:
        job = subprocess.Popen([*command, "--save", str(folder / "saved")], stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 60
        while "epoch   1" not in said(folder):
            assert time.monotonic() < deadline, said(folder)
            assert job.poll() is None, said(folder)
            time.sleep(0.01)
        os.kill(worker_of(folder), signal.SIGKILL)
        yield job
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGINT)
            job.wait(20)


def said(folder: Path) -> str:
    return (folder / "output").read_text()


def worker_of(folder: Path) -> int:
    for pid in processes_with(str(folder / "saved")):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if words[1:2] == [str(EXAMPLE).encode()]:
            return pid
    raise AssertionError("no worker runs")


def test_a_shard_that_nobody_else_has_is_lost_and_the_job_says_which(tmp_path: Path) -> None:
    done = farandole_run(
        *("-np", "2", "--restarts", "0", sys.executable, str(SCRIPTS / "sharded_job.py")),
        *("--save", str(tmp_path / "parameters.pt"), "--kill", "forward"),
    )
    assert done.returncode == 1, done.stdout[-4000:] + done.stderr[-4000:]
    expected = "ShardLost: shard 1 of 2: parameters and optimizer state of commit 10 were lost with the last worker"
    assert expected in done.stderr + done.stdout
    assert "Give ShardedState a checkpoint folder" in done.stderr + done.stdout


def test_with_a_checkpoint_the_others_go_back_to_it_and_end_as_one_process(tmp_path: Path) -> None:
    with job_without_replica(tmp_path, "--epochs", "6", "--checkpoint", str(tmp_path / "checkpoints")) as job:
        assert job.wait(30) == 0, said(tmp_path)
    assert re.search(r"shard [01] of 2: .* All go back to the checkpoint .*/checkpoints/", said(tmp_path)), said(
        tmp_path
    )
    again = re.findall(r"batch +(\d+) ", output)[-1]
    assert int(again) % 30 == 0, output
    data = pytest.importorskip("sklearn.datasets").load_digits()
    images, labels = torch.tensor(data.images).reshape(-1, 64) / 16.0, torch.tensor(data.target)
    epochs = [torch.randperm(1440, generator=torch.Generator().manual_seed(epoch)) for epoch in range(6)]
    check_equal(tmp_path / "saved", one_process(images, labels, [each for epoch in epochs for each in epoch.split(48)]))
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
