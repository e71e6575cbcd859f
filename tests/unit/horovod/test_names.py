"""The modules of the alias that are not files: what the table says, under Horovod's paths."""

from __future__ import annotations

import importlib
import sys
from importlib import util

import pytest

import farandole as fd
from farandole.integrations.horovod.alias_importer import MISSING, NAMES, TORCH


@pytest.mark.parametrize("module", sorted(set(NAMES) - {"ray", "spark"}))  # these import programs that may be missing
def test_a_module_has_the_very_objects_of_its_home(module: str) -> None:
    found = importlib.import_module(f"horovod.{module}")
    for home, names in NAMES[module].items():
        for name in names.split():
            assert getattr(found, name) is getattr(importlib.import_module(home), name)
    assert util.find_spec(f"horovod.{module}") is not None


def test_horovod_torch_has_farandoles_functions_and_its_own_modules() -> None:
    hvd = importlib.import_module("horovod.torch")
    assert {name for name in TORCH.split() if getattr(hvd, name) is not getattr(fd, name)} == set()
    assert hvd.mpi_ops.allreduce is hvd.allreduce
    assert importlib.import_module("horovod.torch.elastic.state").TorchState is hvd.elastic.TorchState


@pytest.mark.parametrize("module", sorted(MISSING))
def test_another_framework_is_refused_with_the_way_out(module: str) -> None:
    with pytest.raises(ImportError, match=rf"horovod\.{module}: .*use horovod\.torch"):
        importlib.import_module(f"horovod.{module}")


def test_the_importer_is_installed_once_however_often_the_alias_is_imported() -> None:
    for _ in range(2):
        importlib.import_module("horovod")
        del sys.modules["horovod"]
    assert [type(each).__name__ for each in sys.meta_path].count("AliasImporter") == 1
