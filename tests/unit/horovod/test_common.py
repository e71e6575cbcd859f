"""horovod.common: what scripts ask about an installation."""

from __future__ import annotations

import importlib

import pytest

import farandole as fd


def test_nccl_is_there_or_not_whoever_is_asked() -> None:
    assert importlib.import_module("horovod.common.util").nccl_built() == fd.nccl_built()


def test_torch_is_the_extension_that_there_is() -> None:
    check = importlib.import_module("horovod.common.util").check_extension
    check("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    with pytest.raises(ImportError, match=r"horovod\.tensorflow"):
        check("horovod.tensorflow", "HOROVOD_WITH_TENSORFLOW", __file__, "mpi_lib")


def test_a_version_mismatch_is_an_import_error_with_the_versions() -> None:
    kind = importlib.import_module("horovod.common.exceptions").HorovodVersionMismatchError
    error = kind("torch", "2.1", "2.0")
    assert isinstance(error, ImportError)
    assert (error.name, error.version, error.installed_version) == ("torch", "2.1", "2.0")
    assert "2.1" in str(error)


def test_a_call_before_init_is_refused_in_horovods_words() -> None:
    hvd = importlib.import_module("horovod.torch")
    for question in (hvd.rank, hvd.size, hvd.local_rank):
        with pytest.raises(ValueError, match=r"Horovod has not been initialized; use hvd\.init\(\)"):
            question()
