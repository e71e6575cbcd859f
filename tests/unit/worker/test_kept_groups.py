"""Which process groups of a worker's world live through the generations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from farandole.collectives.named.negotiation import NamedSettings
from farandole.collectives.ring_builder import DataListener
from farandole.errors import ConfigError
from farandole.process_group import torch_versions
from farandole.worker.world_builder import WorldBuilder

pytestmark = pytest.mark.core


@pytest.fixture
def builder() -> Iterator[WorldBuilder]:
    listener = DataListener()
    yield WorldBuilder(listener, "w0", "a host", NamedSettings)
    listener.close()


def can_reconfigure(monkeypatch: pytest.MonkeyPatch, can: bool) -> None:
    monkeypatch.setattr(torch_versions, "can_reconfigure", lambda: can)


def test_each_number_has_one_group_in_all_generations(builder: WorldBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    can_reconfigure(monkeypatch, True)
    first, second = builder._kept_group(0, is_default=True), builder._kept_group(1, is_default=True)
    assert first is not None
    assert first is not second
    assert builder._kept_group(0, is_default=True) is first


def test_the_user_decides_otherwise_the_default(builder: WorldBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    can_reconfigure(monkeypatch, True)
    assert builder._kept_group(0, is_default=False) is None
    monkeypatch.setenv("FARANDOLE_RECONFIGURE", "1")
    builder.forget_settings()
    assert builder._kept_group(0, is_default=False) is not None
    monkeypatch.setenv("FARANDOLE_RECONFIGURE", "0")
    builder.forget_settings()
    assert builder._kept_group(0, is_default=True) is None


def test_a_torch_without_such_groups_has_new_ones_and_refuses_the_requirement(
    builder: WorldBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    can_reconfigure(monkeypatch, False)
    assert builder._kept_group(0, is_default=True) is None
    monkeypatch.setenv("FARANDOLE_RECONFIGURE", "1")
    builder.forget_settings()
    assert builder._kept_group(0, is_default=True) is None  # the transport has no such group
    monkeypatch.setenv("FARANDOLE_TRANSPORT", "gloo")
    builder.forget_settings()
    with pytest.raises(ConfigError, match=r"FARANDOLE_RECONFIGURE=1 needs torch 2\.14 or newer, this is .*: unset it"):
        builder._kept_group(0, is_default=True)
