"""Check whether this process can use NCCL. transport_choice.py asks."""

from __future__ import annotations

import torch
import torch.distributed as dist


def own_problem() -> str:
    """Return why this process cannot use NCCL; empty if it can. Touches no device."""
    has_nccl = dist.is_available() and dist.is_nccl_available()
    return problem(torch.version.cuda is not None, has_nccl, torch.cuda.device_count())


def problem(has_cuda: bool, has_nccl: bool, devices: int) -> str:
    """Return why a process with such a torch cannot use NCCL; empty if it can."""
    if not has_cuda:
        return f"torch {torch.__version__} is a build without CUDA"
    if not has_nccl:
        return f"torch {torch.__version__} is a build without NCCL"
    if devices == 0:
        return "torch finds no CUDA device: look at nvidia-smi and CUDA_VISIBLE_DEVICES"
    return ""
