"""Models that fully_shard() has divided, in an elastic loop: a worker is killed in backward() and replaced, and the
model is that of one process; and what cannot be had is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.torch_version import TorchVersion

from farandole.errors import ConfigError
from farandole.integrations.sharding.adoption import adopt_shards
from tests.support.jobs import SCRIPTS, farandole_run

pytestmark = [
    pytest.mark.core,
    pytest.mark.skipif(torch.__version__ < "2.13", reason="an older FSDP2 is refused"),
]

SCRIPT = str(SCRIPTS / "sharded_loop.py")


@pytest.mark.parametrize(
    "kind",
    [
        "tied",
        "clipped",
        *(pytest.param(each, marks=pytest.mark.long) for each in ("frozen", "adagrad", "accumulated")),
    ],
)
def test_after_a_kill_and_a_join_the_model_is_that_of_one_process(tmp_path: Path, kind: str) -> None:
    done = farandole_run("-np", "3", "--min-np", "2", sys.executable, SCRIPT, kind, "--kill", str(tmp_path / "killed"))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.count("EQUAL [2, 3]") == 2, done.stdout
    assert done.stdout.count("EQUAL [3]") == 1, done.stdout


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("norm", "ByNorm takes another step for a part of the model alone"),
        ("changed", "embedding.weight was changed outside of optimizer.step()"),
        ("weighed", "fd.weight() and a loss that uses parameters directly, as by full_tensor()"),
        ("closure", "step(closure), or a method of AdamW besides step(), with a model that fully_shard() has divided"),
        ("average", "state.average of type list cannot be pickled (a tensor that is divided among the workers"),
        ("two optimizers", "needs one optimizer in its TorchState"),
        ("whole", "1 of its parameters are whole. Call fully_shard() for the root of the model, too"),
    ],
)
def test_what_cannot_be_divided_anew_is_refused(kind: str, words: str) -> None:
    done = farandole_run("-np", "2", "--restarts", "0", sys.executable, SCRIPT, kind)
    assert done.returncode == 1, done.stdout[-4000:] + done.stderr[-4000:]
    assert words in done.stderr.splitlines()[-1], done.stderr


def test_checkpoints_of_the_job_are_refused(tmp_path: Path) -> None:
    done = farandole_run("-np", "2", "--checkpoint", str(tmp_path), sys.executable, SCRIPT, "tied")
    assert done.returncode == 1, done.stdout[-4000:] + done.stderr[-4000:]
    assert "--checkpoint with a model that fully_shard() has divided is not supported" in done.stderr.splitlines()[-1]


class Asked(SimpleNamespace):
    """The part of a state that is asked before anything is made elastic."""

    shards = None


def test_a_torch_whose_fsdp2_cannot_be_divided_anew_is_refused_when_training_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.1"))
    with pytest.raises(ConfigError, match=r"needs torch 2\.13 or newer, this is 2\.12\.1: update it, or use farandole"):
        adopt_shards(Asked())  # type: ignore[arg-type]


def test_another_fsdp2_is_found_out_at_the_start() -> None:
    done = farandole_run("-np", "2", "--restarts", "0", sys.executable, SCRIPT, "other torch")
    assert done.returncode == 1, done.stdout[-4000:] + done.stderr[-4000:]
    assert "could not be divided anew after a loss ('FSDPParam' object has no attribute '_init" in done.stderr
