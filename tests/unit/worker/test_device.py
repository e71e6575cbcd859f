"""The device of a worker, with pretended CUDA devices."""

from __future__ import annotations

import pytest
import torch

from farandole.training.worker import context


def devices(monkeypatch: pytest.MonkeyPatch, count: int, slots: int) -> list[str]:
    """The device of the worker in each slot, where each sees `count` devices."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    found = list[str]()
    for number in range(slots):
        monkeypatch.setattr(context, "slot", lambda number=number: number)
        found.append(str(context.device()))
    return found


@pytest.fixture(autouse=True)
def _no_warning_yet() -> None:
    context._warn_of_missing_device.cache_clear()


def test_a_worker_has_the_device_of_its_slot(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert devices(monkeypatch, 3, 3) == ["cuda:0", "cuda:1", "cuda:2"]
    assert devices(monkeypatch, 0, 2) == ["cpu", "cpu"]
    assert caplog.records == []


def test_a_worker_that_sees_one_device_has_that_one_in_any_slot(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert devices(monkeypatch, 1, 4) == ["cuda:0"] * 4
    assert caplog.records == []


def test_a_worker_whose_device_is_missing_says_once_that_it_computes_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert devices(monkeypatch, 2, 3) == ["cuda:0", "cuda:1", "cpu"]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(
        "the worker in slot 2 computes on the CPU, since it sees 2 CUDA devices, and none of its number"
    )
