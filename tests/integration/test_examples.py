"""The examples run as they are; where they are elastic, a worker is killed in them and its replacement joins."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.jobs import SCRIPTS, farandole, farandole_run

EXAMPLES = Path(__file__).parents[2] / "examples"
KILL_IN = 15
"""The batch, as a worker counts them, in which one of the workers is killed."""


def run_with_a_kill_and_a_join(folder: Path, script: str, *arguments: str, flags: tuple[str, ...] = ()) -> str:
    """Run an example with two workers. Return what they printed."""
    words = ["-np", "2", "--sample-ledger", str(folder / "ledger"), *flags, sys.executable]
    wrapper = [str(SCRIPTS / "kill_in_script.py"), str(folder / "mark"), str(KILL_IN), str(EXAMPLES / script)]
    done = farandole_run(*words, *wrapper, *arguments, timeout_s=90)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "killed by SIGKILL" in done.stderr
    assert "3 generations, 1 worker lost, 1 joined" in done.stderr
    return done.stdout


def check_ledger(folder: Path, epochs: int) -> None:
    """Check that each sample of each epoch was trained exactly once, by workers with equal parameters."""
    checked = farandole("ledger", "check", "--json", str(folder / "ledger"))
    found = json.loads(checked.stdout)
    assert found["is_exact"], checked.stdout
    assert len(found["epochs"]) == epochs


SMALL = ("--text", "40000", "--length", "32", "--width", "32", "--layers", "2", "--write", "50")


def test_the_gpt_learns_while_a_worker_is_killed_and_another_one_joins(tmp_path: Path) -> None:
    saved = tmp_path / "gpt.pt"
    printed = run_with_a_kill_and_a_join(tmp_path, "gpt/train.py", *SMALL, "--epochs", "2", "--save", str(saved))
    check_ledger(tmp_path, epochs=2)
    losses = [float(loss) for loss in re.findall(r"loss on unseen text (\S+)", printed)]
    assert losses[1] < losses[0] < 4.0  # of the characters, which are nearly a hundred, every one has e ** -4.5
    assert len(printed) > 50
    checkpoint = torch.load(saved)
    assert checkpoint["model"]["head.weight"].shape == (len(checkpoint["alphabet"]), 32)


def test_the_gpt_learns_in_bfloat16(tmp_path: Path) -> None:
    script = str(EXAMPLES / "gpt" / "train.py")
    done = farandole_run("-np", "2", sys.executable, script, *SMALL, "--epochs", "1", "--bf16")
    assert done.returncode == 0, done.stderr
    (loss,) = re.findall(r"loss on unseen text (\S+)", done.stdout)
    assert float(loss) < 4.0


def test_a_gpt_that_fsdp2_divides_learns_while_a_worker_is_killed_and_another_one_joins(tmp_path: Path) -> None:
    saved = tmp_path / "gpt.pt"
    words = ("--text", "20000", "--length", "16", "--width", "32", "--layers", "1", "--save", str(saved))
    printed = run_with_a_kill_and_a_join(tmp_path, "fsdp/train.py", *words)
    check_ledger(tmp_path, epochs=2)
    lines = re.findall(r"loss on unseen text (\S+) .* has (\S+) of (\S+) parameters", printed)
    assert float(lines[1][0]) < float(lines[0][0]) < 4.0
    mine, whole = (int(number.replace(",", "")) for number in lines[1][1:])
    assert mine < 0.6 * whole
    assert sum(each.numel() for each in torch.load(saved).values()) == whole


@pytest.mark.long
def test_a_resnet_learns_is_resumed_and_is_evaluated_where_farandole_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the script makes its images here
    run_with_a_kill_and_a_join(tmp_path, "image_folder/train.py", "--width", "8", "--epochs", "2")
    check_ledger(tmp_path, epochs=2)
    assert len(list(tmp_path.glob("digits/*/*/*.ppm"))) == 1797
    script = str(EXAMPLES / "image_folder" / "train.py")
    resumed = farandole_run("-np", "2", sys.executable, script, "--width", "8", "--resume", "--epochs", "3")
    assert resumed.returncode == 0, resumed.stderr
    lines = re.findall(r"epoch +(\d) +accuracy (\S+)", resumed.stdout)
    # The file was written behind the batches of epoch 2, and what the loop does there is done again.
    assert [epoch for epoch, _ in lines] == ["2", "3"]
    evaluated = without_farandole(EXAMPLES / "image_folder" / "evaluate.py", "resnet.pt")
    assert f"accuracy {lines[-1][1]} of 360 images" in evaluated
    assert float(lines[-1][1].strip("%")) > 80


def without_farandole(script: Path, *arguments: str) -> str:
    """Run a script in a process for which Farandole is not installed. Return what it printed."""
    packages = Path("packages")
    packages.mkdir()
    for folder in (Path(path) for path in sys.path if path.endswith("site-packages")):
        for entry in folder.iterdir():
            if "farandole" not in entry.name and entry.suffix != ".pth" and not (packages / entry.name).exists():
                (packages / entry.name).symlink_to(entry)
    # -S: no site-packages but those; so neither farandole nor its entry point, which torch would load, can be found.
    code = (
        "import importlib.metadata, importlib.util, runpy, sys\n"
        "assert importlib.util.find_spec('farandole') is None\n"
        "sys.argv = sys.argv[1:]; sys.path[0] = sys.argv[0].rpartition('/')[0]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "assert 'farandole' not in {name.partition('.')[0] for name in sys.modules}\n"
        "assert 'farandole' not in importlib.metadata.packages_distributions()\n"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, str(script), *arguments],
        env={**os.environ, "PYTHONPATH": str(packages.absolute())},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


DDP = str(EXAMPLES / "ddp" / "train.py")


def test_a_script_of_ddp_is_elastic_without_a_change(tmp_path: Path) -> None:
    snapshot = str(tmp_path / "snapshot.pt")
    printed = run_with_a_kill_and_a_join(
        tmp_path, "ddp/train.py", "--epochs", "2", "--snapshot", snapshot, flags=("--in-place",)
    )
    check_ledger(tmp_path, epochs=2)
    assert re.findall(r"epoch +(\d)", printed) == ["1", "2"]


@pytest.mark.long
def test_a_script_of_ddp_starts_again_from_its_snapshot_under_farandole_torchrun(tmp_path: Path) -> None:
    wrapper = [str(SCRIPTS / "kill_in_script.py"), str(tmp_path / "mark"), "90", DDP]
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", *wrapper]
    done = farandole("torchrun", *words, "--epochs", "3", "--snapshot", str(tmp_path / "snapshot.pt"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mark").exists()
    epochs = re.findall(r"epoch +(\d) +accuracy (\S+)%   workers 2", done.stdout)
    assert [epoch for epoch, _ in epochs] == ["1", "2", "3"]
    assert float(epochs[-1][1]) > 80


@pytest.mark.long
def test_a_script_of_horovod_runs_without_a_change() -> None:
    script = str(EXAMPLES / "horovod" / "train.py")
    done = farandole_run("-np", "2", "--horovod", sys.executable, script, "--epochs", "3")
    assert done.returncode == 0, done.stderr
    (accuracy,) = re.findall(r"epoch 3: accuracy (\S+)%, 2 workers", done.stdout)
    assert float(accuracy) > 70


@pytest.mark.long
def test_an_elastic_script_of_horovod_goes_on_without_a_killed_worker_and_with_a_new_one(tmp_path: Path) -> None:
    words = ("--epochs", "2", "--batches-per-commit", "2")
    printed = run_with_a_kill_and_a_join(tmp_path, "horovod/elastic.py", *words, flags=("--horovod",))
    check_ledger(tmp_path, epochs=2)
    (accuracy,) = re.findall(r"epoch 2: accuracy (\S+)%, 2 workers", printed)
    assert float(accuracy) > 50
