"""Why a process cannot use NCCL."""

from __future__ import annotations

import pytest
import torch

from farandole.training.collectives.nccl_transport import nccl_problem, own_nccl_problem


@pytest.mark.parametrize(
    ("has_cuda", "has_nccl", "devices", "said"),
    [
        (False, False, 0, "without CUDA"),
        (True, False, 2, "without NCCL"),
        (True, True, 0, "no CUDA device: check nvidia-smi"),
    ],
)
def test_what_is_missing_is_said(has_cuda: bool, has_nccl: bool, devices: int, said: str) -> None:
    assert said in nccl_problem(has_cuda, has_nccl, devices)


def test_nothing_is_said_where_nothing_is_missing() -> None:
    assert nccl_problem(True, True, 1) == ""


def test_the_own_problem_is_that_of_the_installed_torch() -> None:
    assert bool(own_nccl_problem()) == (not (torch.cuda.is_available() and torch.distributed.is_nccl_available()))
