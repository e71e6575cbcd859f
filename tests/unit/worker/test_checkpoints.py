"""Checkpoints where there is no launcher of ours: the environment says where, and rank 0 takes the place itself."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import farandole as fd
from farandole.errors import ConfigError
from farandole.integrations.horovod.object_state import ObjectState
from farandole.training.state import step
from farandole.training.worker.run_loop import run

pytestmark = pytest.mark.core


class Stopped(Exception):
    """The job is lost."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("FARANDOLE_CHECKPOINT", str(tmp_path))
    monkeypatch.setenv("FARANDOLE_CHECKPOINT_EVERY", "1steps")
    fd.init()
    yield tmp_path
    step.on_decided(None)
    step.close()
    fd.shutdown()


def newest(folder: Path) -> dict[str, Any]:
    manifests = [json.loads(path.read_text()) for path in folder.glob("*/manifest.json")]
    return max(manifests, key=lambda each: (each["run_id"], each["step"], each["boundary"]))


def object_state(**values: Any) -> ObjectState:
    return ObjectState(lambda value: value, lambda: 0, **values)


def count_to(last: int, lost_after: int | None = None) -> tuple[list[int], ObjectState]:
    """Batches that were trained by this job."""
    state, trained = object_state(batch=0, seen={"set of": {1}}, pair=(0, 0.5)), []

    @run
    def train(state: ObjectState) -> None:
        while state.batch < last:
            if state.batch == lost_after:
                raise Stopped
            state.batch += 1
            state.pair = (state.batch, float("inf"))
            trained.append(state.batch)
            state.commit()

    if lost_after is None:
        train(state)
    else:
        with pytest.raises(Stopped):
            train(state)
    return trained, state


def test_an_object_state_goes_on_from_its_newest_commit_that_was_saved(folder: Path) -> None:
    first, _ = count_to(500, lost_after=400)
    saved = newest(folder)["step"]
    assert newest(folder)["rule"] == "commit"
    assert 1 <= saved <= 400
    second, state = count_to(500)
    assert first == list(range(1, 401))
    assert second == list(range(saved + 1, 501))
    assert (state.batch, state.seen, state.pair) == (500, {"set of": {1}}, (500, float("inf")))
    assert (newest(folder)["step"], newest(folder)["run_id"]) == (500, 2)
    assert count_to(500)[0] == [], "there was nothing left to do"


def test_a_step_rule_state_goes_on_in_the_middle_of_the_epoch(folder: Path) -> None:
    def job(lost_at: int | None) -> list[float]:
        model = torch.nn.Linear(1, 1)
        optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        data = torch.utils.data.TensorDataset(torch.arange(400.0).view(-1, 1))
        loader = fd.elastic.DataLoader(data, global_batch_size=4)
        state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader, trained=[])

        @run
        def train(state: Any) -> None:
            for _ in loader.epochs(1):
                for (x,) in loader:
                    if state.step == lost_at:
                        raise Stopped
                    optimizer.zero_grad()
                    (model(x) * 1e-6).mean().backward()
                    optimizer.step()
                    state.trained = [*state.trained, *x.view(-1).tolist()]

        if lost_at is None:
            train(state)
        else:
            with pytest.raises(Stopped):
                train(state)
        return list(state.trained)

    job(lost_at=60)
    saved = newest(folder)
    assert 1 <= saved["step"] <= 60
    assert saved["cursor"] == 4 * saved["step"]
    assert sorted(job(lost_at=None)) == [float(number) for number in range(400)]


def test_another_job_is_told_that_the_place_is_taken() -> None:
    state = object_state(batch=0)

    @run
    def outer(state: ObjectState) -> None:
        with pytest.raises(ConfigError, match="another job is using this folder"):
            run(lambda _: None)(object_state(batch=0))

    outer(state)


def test_a_place_that_a_later_job_has_taken_is_not_written_to_any_more(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = object_state(batch=0)

    @run
    def train(state: ObjectState) -> None:
        counted = json.loads((folder / "job.json").read_text())
        (folder / "job.json").write_text(json.dumps({**counted, "owner": "a later job"}))
        state.commit()

    with caplog.at_level(logging.WARNING, "farandole"):
        train(state)
    assert "another job now uses this place for its checkpoints" in caplog.text
    assert list(folder.glob("step-*")) == []


def test_a_state_that_only_knows_itself_is_refused_with_what_to_do() -> None:
    class Own(ObjectState):
        def sync(self) -> None:
            super().sync()

    with pytest.raises(ConfigError, match=r"--checkpoint needs .* state\.save_once\(\) lets one worker write a file"):
        run(lambda _: None)(Own(lambda value: value, lambda: 0, batch=0))


def test_a_value_that_no_checkpoint_can_hold_is_named_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"metadata\.values\.when is a .*Path"):
        run(lambda _: None)(object_state(when=Path()))


@pytest.mark.parametrize(("name", "value"), [("KEEP", "0"), ("KEEP", "two"), ("EVERY", "often")])
def test_a_setting_that_cannot_be_meant_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"FARANDOLE_CHECKPOINT_{name}", value)
    with pytest.raises(ConfigError, match=value):
        run(lambda _: None)(object_state(batch=0))


class Rounding:
    """An object whose load_state_dict() does not restore what its state_dict() has returned."""

    def __init__(self, is_wrong: bool) -> None:
        self.value, self._is_wrong = torch.tensor([1 / 3], dtype=torch.float64), is_wrong

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"].float().double() if self._is_wrong else state["value"]


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_strict_job_that_resumes_compares_its_state_with_the_one_that_was_saved(
    is_wrong: bool, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKL_CBWR", "AUTO,STRICT")

    def train(epochs: int, is_wrong: bool) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        optimizer = fd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), fused=True))
        loader = fd.elastic.DataLoader(torch.utils.data.TensorDataset(torch.rand(8, 2)), 4, strict=True, shards=2)
        state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader, mine=Rounding(is_wrong))

        @run
        def function(state: Any) -> None:
            for _ in loader.epochs(epochs):
                for (x,) in loader:
                    optimizer.zero_grad()
                    model(x).sum().backward()
                    optimizer.step()

        function(state)

    train(1, False)
    with caplog.at_level(logging.WARNING):
        train(2, is_wrong)
    assert ("the state that was loaded from" in caplog.text) == is_wrong, caplog.text
    assert newest(folder)["step"] == 4
