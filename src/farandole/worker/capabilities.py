"""What the installed Farandole and torch can do: Horovod's questions, and `--check-build`'s.

Horovod answers with how it was built. Nothing is built here, so the answers are those of the installed torch, and
about the controller those of Farandole. Two need an explanation: gloo_built() and gloo_enabled() are always True.
To Horovod, Gloo is the way without MPI: over TCP, started by horovodrun, able to be elastic. Scripts and test suites
ask for it to find out whether that is possible, and here it always is, on a TCP ring of our own.
"""

from __future__ import annotations

import json

import torch
import torch.distributed


def gloo_built(verbose: bool = False) -> bool:
    """Whether workers can talk over TCP without MPI. Always."""
    return True


def gloo_enabled() -> bool:
    """Whether they do. Always."""
    return True


def mpi_built(verbose: bool = False) -> bool:
    """Whether the installed torch has MPI. Farandole itself never uses it."""
    return _has_torch("mpi")


def mpi_enabled() -> bool:
    """Whether workers talk over MPI. Never, also when mpirun has started them."""
    return False


def mpi_threads_supported() -> bool:
    """Whether MPI may be called from several threads. Never: MPI is not initialized."""
    return False


def nccl_built(verbose: bool = False) -> int:
    """The version of NCCL in the installed torch, in NCCL's own coding: 2.7.8 is 2708, 2.21.5 is 22105. 0: none."""
    if not _has_torch("nccl"):
        return 0
    from torch.cuda import nccl  # has no version in a torch without CUDA

    major, minor, patch = nccl.version()[:3]  # type: ignore[no-untyped-call]
    return nccl_version_code(major, minor, patch)


def nccl_version_code(major: int, minor: int, patch: int) -> int:
    """As NCCL's header has it: it ran out of digits with 2.9."""
    return (1000 if (major, minor) <= (2, 8) else 10_000) * major + 100 * minor + patch


def ddl_built(verbose: bool = False) -> bool:
    """Whether IBM's DDL can be used. Never."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """Whether Intel's oneCCL can be used. Never."""
    return False


def cuda_built(verbose: bool = False) -> bool:
    """Whether the installed torch has CUDA; it may find no device all the same."""
    return torch.version.cuda is not None


def rocm_built(verbose: bool = False) -> bool:
    """Whether the installed torch has ROCm; it may find no device all the same."""
    return torch.version.hip is not None


def _has_torch(backend: str) -> bool:
    if not torch.distributed.is_available():
        return False
    return bool(getattr(torch.distributed, f"is_{backend}_available")())


def _describe() -> dict[str, object]:
    return {
        "torch": torch.__version__,
        "cuda": cuda_built(),
        "rocm": rocm_built(),
        "gloo": _has_torch("gloo"),
        "nccl": nccl_built() > 0,
        "mpi": _has_torch("mpi"),
    }


if __name__ == "__main__":
    print(json.dumps(_describe()))
