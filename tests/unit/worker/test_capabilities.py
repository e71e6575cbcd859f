"""What Horovod's scripts ask for is answered for the torch that is installed."""

from __future__ import annotations

import pytest
import torch

from farandole.training.worker import capabilities


def test_the_way_without_mpi_is_always_there() -> None:
    assert capabilities.gloo_built()
    assert capabilities.gloo_enabled()
    assert not capabilities.mpi_enabled()
    assert not capabilities.mpi_threads_supported()
    assert not capabilities.ddl_built()
    assert not capabilities.ccl_built()


def test_the_rest_is_what_torch_says() -> None:
    assert capabilities.cuda_built() == (torch.version.cuda is not None)
    assert capabilities.rocm_built() == (torch.version.hip is not None)
    assert capabilities.mpi_built(verbose=True) == torch.distributed.is_mpi_available()
    assert (capabilities.nccl_built() > 0) == torch.distributed.is_nccl_available()


@pytest.mark.parametrize(
    ("version", "code"), [((2, 7, 8), 2708), ((2, 8, 3), 2803), ((2, 9, 6), 20906), ((2, 21, 5), 22105)]
)
def test_versions_of_nccl_are_coded_as_nccl_does(version: tuple[int, int, int], code: int) -> None:
    assert capabilities.nccl_version_code(*version) == code
