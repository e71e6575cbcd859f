"""What Lightning and transformers log to TensorBoard by themselves, and to a Tracker, in a job whose rank 0 is killed
twice, and leaves once: one folder with each point once, as in the undisturbed job."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.scripts.framework_model import EPOCHS, STEPS_PER_EPOCH
from tests.support.jobs import SCRIPTS, farandole_run
from tests.support.tracked_jobs import Curves, check_curves, curves_of

pytestmark = pytest.mark.timeout(300)

WORKERS = 3
STEPS = EPOCHS * STEPS_PER_EPOCH


def train(script: str, folder: Path, workers: int, faults: int = 0) -> None:
    folder.mkdir()
    words = ("--folder", str(folder), "--faults", str(faults))
    job = farandole_run("-np", str(workers), sys.executable, str(SCRIPTS / script), *words, timeout_s=200)
    assert job.returncode == 0, job.stdout + job.stderr
    if faults:
        ends = sorted(path.name for path in folder.glob("ended-*"))
        assert ends == ["ended-before the log", "ended-behind the log", "ended-leaving"]


def board_of(folder: Path) -> Curves:
    """The points of the only folder with files of TensorBoard."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (only,) = {file.parent for file in folder.rglob("events.out.*")}
    board = event_accumulator.EventAccumulator(str(only), size_guidance={"scalars": 0})
    board.Reload()
    curves: Curves = {}
    for name in board.Tags()["scalars"]:
        points = board.Scalars(name)
        assert len({point.step for point in points}) == len(points), f"{name} has points twice"
        curves[name] = {point.step: point.value for point in points}
    return curves


def split(curves: Curves, local: str) -> tuple[Curves, Curves]:
    """Curves that are equal on all workers, and those of a worker's own samples or time, of which the steps count."""
    words = local.split()
    ours = {name: curve for name, curve in curves.items() if any(word in name for word in words)}
    return {name: curve for name, curve in curves.items() if name not in ours}, ours


@pytest.mark.parametrize(
    ("script", "every_step", "local"),
    [
        ("tracked_transformers.py", "train/grad_norm", "runtime per_second train/loss train/train_loss flos"),
        ("tracked_lightning.py", "weight", "loss hp_metric"),
    ],
)
def test_tensorboard_has_one_folder_with_each_point_once(
    tmp_path: Path, script: str, every_step: str, local: str
) -> None:
    pytest.importorskip(script.removeprefix("tracked_").removesuffix(".py"))
    train(script, tmp_path / "job", WORKERS, WORKERS)
    train(script, tmp_path / "alone", 1)
    found, found_local = split(board_of(tmp_path / "job"), local)
    expected, expected_local = split(board_of(tmp_path / "alone"), local)
    assert len(expected[every_step]) == STEPS
    check_curves(found, expected, relative=1e-6)
    assert {name: list(curve) for name, curve in found_local.items()} == {
        name: list(curve) for name, curve in expected_local.items()
    }
    tracked = [curves_of(tmp_path / folder / "metrics.csv") for folder in ("job", "alone")]
    assert sorted(map(len, tracked[0].values())) == sorted(map(len, tracked[1].values()))
    check_curves(*(split(each, local + " loss")[0] for each in tracked))
