"""Models that are divided by FSDP2, with replicas: a worker is killed in the middle of a step and replaced; and what
becomes of a job in which nobody else had its shard."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.jobs import SCRIPTS, farandole_run

pytestmark = [
    pytest.mark.core,
    pytest.mark.skipif(torch.__version__ < "2.8", reason="older FSDP2 has no replicas on CPU tensors"),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "hybrid_sharding" / "train.py"

BATCHES = [torch.arange(48) + step * 48 % 480 for step in range(50)]


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """What tests/scripts/sharded_job.py trains on."""
    generator = torch.Generator().manual_seed(1)
    return torch.rand(480, 64, generator=generator).double(), torch.randint(0, 10, (480,), generator=generator)


def entered(output: str) -> list[dict[str, Any]]:
    """What each worker said when it entered the function."""
    return [json.loads(line) for line in re.findall(r"\{.*\}", output)]


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
    worlds = {(each["batch"], each["size"], each["replicas"], each["shards"]) for each in entered(done.stdout)}
    # In between each of the three has the whole, made of the shards of the replica that is whole still.
    assert worlds == {(0, 4, 2, 2), (10, 3, 3, 1), (25, 4, 2, 2)}
    check_equal(saved, one_process(*data(), BATCHES))


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
    saved, folder = tmp_path / "parameters.pt", tmp_path / "checkpoints"
    done = farandole_run(
        *("-np", "2", "--restarts", "0", sys.executable, str(SCRIPTS / "sharded_job.py")),
        *("--save", str(saved), "--kill", "backward", "--checkpoint", str(folder)),
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    said = done.stdout + done.stderr
    assert re.search(r"shard 1 of 2: .* commit 10 were lost .* All workers return to the checkpoint", said), said
    assert {(each["batch"], each["size"]) for each in entered(done.stdout)} == {(0, 2), (5, 1)}
    check_equal(saved, one_process(*data(), BATCHES))


@pytest.mark.parametrize("kind", ["optimizer", "commits"])
def test_what_takes_parameters_to_be_equal_on_all_workers_refuses_shards(kind: str) -> None:
    done = farandole_run("-np", "2", sys.executable, str(SCRIPTS / "shards_in_a_state.py"), kind)
    assert done.returncode == 1
    assert "NOT REFUSED" not in done.stdout
    assert "a parameter of shape (4, 6) is divided among the workers, as by fully_shard()" in done.stderr
    assert "give model and optimizer to TorchState" in done.stderr.splitlines()[-1]


def test_the_example_trains_as_a_plain_loop_does(tmp_path: Path) -> None:
    saved = tmp_path / "parameters.pt"
    done = farandole_run("-np", "1", sys.executable, str(EXAMPLE), "--epochs", "1", "--save", str(saved))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    images, labels = torch.tensor(digits.images).reshape(-1, 64) / 16.0, torch.tensor(digits.target)
    order = torch.randperm(1440, generator=torch.Generator().manual_seed(0))
    check_equal(saved, one_process(images, labels, list(order.split(48))))
