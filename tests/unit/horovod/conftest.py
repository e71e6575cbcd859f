"""`import horovod` finds the alias in these tests, and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from farandole.integrations.horovod import alias_path
from farandole.training.collectives import world


@pytest.fixture(autouse=True)
def alias(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(alias_path()))
    monkeypatch.setattr(world.view, "without_world", world.view.without_world)  # importing the alias changes it
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        del sys.modules[name]
