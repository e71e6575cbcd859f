"""Which process groups of a worker's world live through the generations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from farandole.errors import ConfigError
from farandole.training.collectives import torch_versions
from farandole.training.collectives.data_listener import DataListener
from farandole.training.worker.world_builder import WorldBuilder

pytestmark = pytest.mark.core


@pytest.fixture
def builder() -> Iterator[WorldBuilder]:
    listener = DataListener()
    yield WorldBuilder(listener, "w0", "a host", {})
    listener.close()


def can_reconfigure(monkeypatch: pytest.MonkeyPatch, can: bool) -> None:
    monkeypatch.setattr(torch_versions, "can_reconfigure", lambda: can)


def test_one_group_lives_through_the_generations_if_the_user_asks_for_it(
    builder: WorldBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    can_reconfigure(monkeypatch, True)
    assert builder._kept_group() is None
    monkeypatch.setenv("FARANDOLE_RECONFIGURE", "1")
    builder.forget_settings()
    first = builder._kept_group()
    assert first is not None
    assert builder._kept_group() is first
    monkeypatch.setenv("FARANDOLE_TRANSPORT", "tcp")  # which has no such group
    builder.forget_settings()
    assert builder._kept_group() is None


def test_a_torch_without_such_groups_has_new_ones_and_refuses_the_requirement(
    builder: WorldBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    can_reconfigure(monkeypatch, False)
    monkeypatch.setenv("FARANDOLE_RECONFIGURE", "1")
    builder.forget_settings()
    assert builder._kept_group() is None
    monkeypatch.setenv("FARANDOLE_TRANSPORT", "nccl")
    builder.forget_settings()
    with pytest.raises(ConfigError, match=r"FARANDOLE_RECONFIGURE=1 needs torch 2\.14 or newer, this is .*: unset it"):
        builder._kept_group()
