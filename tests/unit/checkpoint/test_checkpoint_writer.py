"""From a state at a boundary to a checkpoint and back, and what happens when it cannot be written."""

from __future__ import annotations

import hashlib
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from farandole import elastic
from farandole.base.checkpoints.folder import CheckpointFolder, Found
from farandole.base.membership import Progress
from farandole.errors import ConfigError
from farandole.training.checkpoint.checkpoint_writer import CheckpointWriter, Written
from farandole.training.checkpoint.file_format import read_files
from farandole.training.checkpoint.restore import read_newest, restore
from farandole.training.checkpoint.snapshot import Staging, live
from farandole.training.state import step

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    step.on_decided(None)
    step.close()


def make(seed: int = 0, width: int = 4, samples: int = 40, **more: Any) -> Any:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.arange(3.0 * samples).view(samples, 3))
    loader = elastic.DataLoader(data, global_batch_size=8)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])
    return elastic.TorchState(
        model=model,
        optimizer=optimizer,
        loader=loader,
        scheduler=scheduler,
        after_step=[scheduler.step],
        **{"best": 1.5, **more},
    )


def train(state: Any, steps: int) -> None:
    """Some steps, the last one at a boundary."""
    batches = iter(state.loader)
    for _ in range(steps):
        (x,) = next(batches)
        state.optimizer.zero_grad()
        state.model(x).square().mean().backward()
        state.optimizer.step()
        step.mark_reduced()
        step.decide()
        state.boundary_number += 1
    state.capture()


def contents(state: Any) -> str:
    """All of it but the run id, tensors as digests."""
    return repr(digested([{**state._metadata(), "run_id": 0}, state.live_tensors()]))


def digested(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [value.dtype, value.shape, hashlib.sha256(value.detach().numpy().tobytes()).hexdigest()]
    if isinstance(value, dict):
        return {key: digested(each) for key, each in value.items()}
    return [digested(each) for each in value] if isinstance(value, list | tuple) else value


class Heard(list[Written]):
    """What a writer told, and its answer when it asks."""

    def __init__(self, folder: Path, keep: int = 2, refusal: str = "") -> None:
        super().__init__()
        self.folder = CheckpointFolder(folder)
        self.asked: list[Progress] = []
        self.refusal = refusal
        self.writer = CheckpointWriter(self.folder, "step", keep, self._ask, self.append)

    def _ask(self, name: str, progress: Progress) -> str:
        assert not (Path(self.folder.store.place) / name / "manifest.json").exists()
        self.asked.append(progress)
        return self.refusal

    def write(self, state: Any) -> None:
        self.writer.write(lambda: live(state, state.progress), state.step, generation=3, workers=2)


def test_another_state_becomes_the_one_that_was_saved_with_all_that_belongs_to_it(tmp_path: Path) -> None:
    state, heard = make(), Heard(tmp_path)
    train(state, 4)
    heard.write(state)
    (found,) = heard.folder.complete()[0]
    assert (found.manifest.step, found.manifest.cursor, found.manifest.generation) == (4, 32, 3)
    assert [(each.step, each.error, each.name) for each in heard] == [(4, "", found.name)]
    other = make(seed=1, best=9.0)
    other.capture()
    assert contents(other) != contents(state)
    restore(other, found, read_files(found), run_id=2)
    assert contents(other) == contents(state)
    assert (other.run_id, other.loader.cursor, other.best) == (2, 32, 1.5)


def test_what_is_written_is_the_state_of_the_boundary_though_training_goes_on(tmp_path: Path) -> None:
    state, heard, staging = make(width=100_000), Heard(tmp_path), Staging()
    train(state, 2)
    at_boundary = contents(state)
    goes_on = threading.Event()

    def finish() -> None:
        assert goes_on.wait(60)
        staging.copies.finish()

    heard.writer.begin(lambda: staging.take(state, state.progress), finish, 2, 1, 1)
    train(state, 2)
    assert contents(state) != at_boundary
    goes_on.set()
    heard.writer.wait()
    other = make(seed=1, width=100_000)
    other.capture()
    restore(other, heard.folder.complete()[0][0], read_files(heard.folder.complete()[0][0]), 2)
    assert contents(other) == at_boundary


def test_staging_memory_is_used_again(tmp_path: Path) -> None:
    state, staging = make(), Staging()
    train(state, 1)
    first = staging.take(state, state.progress)
    train(state, 1)
    second = staging.take(state, state.progress)
    assert {t.data_ptr() for t in first.tensors.values()} == {t.data_ptr() for t in second.tensors.values()}


def test_the_coordinators_no_leaves_nothing_behind(tmp_path: Path) -> None:
    state, heard = make(), Heard(tmp_path)
    train(state, 1)
    heard.write(state)
    heard.refusal = "this worker was cut off"
    train(state, 1)
    heard.write(state)
    assert "this worker was cut off" in heard[1].error
    assert [each.manifest.step for each in heard.folder.complete()[0]] == [1]
    assert len(list(tmp_path.iterdir())) == 1
    assert [each.step for each in heard.asked] == [1, 2]


def test_a_full_disk_leaves_the_last_good_checkpoint_and_is_told(tmp_path: Path) -> None:
    state, heard = make(width=4000), Heard(tmp_path)
    train(state, 1)
    heard.write(state)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        train(state, 1)
        heard.write(state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large" in heard[1].error
    assert str(tmp_path) in heard[1].error
    train(state, 1)
    heard.write(state)
    assert [each.error for each in heard][::2] == ["", ""]
    assert [each.manifest.step for each in heard.folder.complete()[0]] == [3, 1]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_was_taken_away_is_told_and_training_goes_on(tmp_path: Path) -> None:
    state, heard = make(), Heard(tmp_path / "gone")
    train(state, 1)
    heard.write(state)
    assert "No such file or directory" in heard[0].error


def test_the_newest_are_kept(tmp_path: Path) -> None:
    state, heard = make(), Heard(tmp_path, keep=2)
    for _ in range(4):
        train(state, 1)
        heard.write(state)
    assert [each.manifest.step for each in heard.folder.complete()[0]] == [4, 3]


def test_one_that_is_given_up_leaves_nothing_and_says_nothing(tmp_path: Path) -> None:
    state, heard = make(), Heard(tmp_path)
    train(state, 1)
    given_up = threading.Event()

    def finish() -> None:
        assert given_up.wait(60)

    heard.writer.begin(lambda: live(state, state.progress), finish, 1, 1, 1)
    threading.Timer(0.01, given_up.set).start()
    heard.writer.give_up()
    assert heard == []
    assert list(tmp_path.iterdir()) == []
    heard.write(state)
    assert len(heard.folder.complete()[0]) == 1


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"width": 5},
            r"parameter model\.0\.weight: \[4, 3\] float32 in the checkpoint, \[5, 3\] float32 in this script",
        ),
        ({"samples": 41}, r"other data: the saved loader has size=40, this one 41"),
        (
            {"accuracy": 0.0},
            r"tracked values: \['best', 'scheduler'\] in the checkpoint, "
            r"\['accuracy', 'best', 'scheduler'\] in this script",
        ),
    ],
)
def test_another_model_or_data_set_is_refused_with_both_values(
    tmp_path: Path, other: dict[str, Any], message: str
) -> None:
    state, heard = make(), Heard(tmp_path)
    train(state, 1)
    heard.write(state)
    different = make(**other)
    different.capture()
    (found,) = heard.folder.complete()[0]
    with pytest.raises(ConfigError, match=message) as raised:
        restore(different, found, read_files(found), 2)
    assert found.place in str(raised.value)
    assert found == heard.folder.complete()[0][0]


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    state, heard = make(), Heard(tmp_path)
    train(state, 1)
    heard.write(state)
    different = make()
    different.optimizer = torch.optim.SGD(different.model.parameters(), lr=0.1)
    different.capture()
    with pytest.raises(
        ConfigError, match=r"optimizer options: .*betas.* in the checkpoint, .*momentum.* in this script"
    ):
        restore(different, heard.folder.complete()[0][0], read_files(heard.folder.complete()[0][0]), 2)


def damage(found: Found) -> None:
    """One bit, so that only the checksum tells."""
    file = Path(found.place) / "tensors.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_damaged_newest_one_falls_back_to_the_one_before_with_a_warning(tmp_path: Path) -> None:
    state, heard, warnings = make(), Heard(tmp_path), []
    train(state, 1)
    heard.write(state)
    first = contents(state)
    train(state, 1)
    heard.write(state)
    newest, before = heard.folder.complete()[0]
    damage(newest)
    found, value = read_newest(heard.folder, warnings.append)
    assert found == before
    restore(state, found, value, 2)
    assert contents(state) == first
    assert len(warnings) == 1
    assert f"{newest.place}/tensors.safetensors is damaged" in warnings[0]


def test_with_damaged_ones_only_there_is_nothing_to_go_on_from_and_nothing_is_removed(tmp_path: Path) -> None:
    state, heard = make(), Heard(tmp_path)
    train(state, 1)
    heard.write(state)
    (found,) = heard.folder.complete()[0]
    damage(found)
    with pytest.raises(ConfigError, match=r"no checkpoint that can be read .*tensors\.safetensors is damaged"):
        read_newest(heard.folder, lambda _: None)
    assert Path(found.place).exists()


def test_a_value_that_cannot_be_saved_is_named_before_anything_is_written(tmp_path: Path) -> None:
    state = make(best=threading.Barrier)
    state.capture()
    with pytest.raises(ConfigError, match=r"metadata\.values\.best is a builtins\.type"):
        live(state, state.progress)


def test_a_value_that_can_no_longer_be_saved_does_not_end_training(tmp_path: Path) -> None:
    state, heard, staging = make(), Heard(tmp_path), Staging()
    state.best = threading.Barrier
    train(state, 1)
    heard.write(state)
    heard.writer.begin(lambda: staging.take(state, state.progress), staging.copies.finish, 1, 1, 1)
    heard.writer.wait()
    assert ["metadata.values.best is a" in each.error for each in heard] == [True, True]
    assert list(tmp_path.iterdir()) == []
