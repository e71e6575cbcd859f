"""The capabilities of the installed Farandole and torch, as queried by Horovod's functions and `--check-build`.

Horovod's answers describe how it was built. Farandole builds nothing, so the answers describe the installed torch, and
for the controller Farandole itself. Two need an explanation: gloo_built() and gloo_enabled() are always True. In
Horovod, Gloo is the backend without MPI: over TCP, started by horovodrun, able to be elastic. Scripts and test suites
query it to find out whether that is possible, and here it always is, on Farandole's own TCP ring.
"""

from __future__ import annotations

import json

import torch
import torch.distributed


def gloo_built(verbose: bool = False) -> bool:
    """Return whether workers can communicate over TCP without MPI. Always True.

    Args:
        verbose: Accepted for Horovod's scripts.

    Examples:
        >>> fd.gloo_built()
        True
    """
    return True


def gloo_enabled() -> bool:
    """Return whether workers communicate over TCP without MPI. Always True.

    See the example of `gloo_built`.
    """
    return True


def mpi_built(verbose: bool = False) -> bool:
    """Return whether the installed torch has MPI. Farandole itself never uses it.

    See the example of `gloo_built`.

    Args:
        verbose: Accepted for Horovod's scripts.
    """
    return _has_torch("mpi")


def mpi_enabled() -> bool:
    """Return whether workers communicate over MPI. Always False, also when mpirun has started them.

    See the example of `gloo_built`.
    """
    return False


def mpi_threads_supported() -> bool:
    """Return whether MPI may be called from several threads. Always False: MPI is not initialized.

    See the example of `gloo_built`.
    """
    return False


def nccl_built(verbose: bool = False) -> int:
    """Return the version of NCCL in the installed torch, in NCCL's own coding: 2.7.8 is 2708, 2.21.5 is 22105. 0:
    none.

    See the example of `gloo_built`.

    Args:
        verbose: Accepted for Horovod's scripts.
    """
    if not _has_torch("nccl"):
        return 0
    from torch.cuda import nccl  # has no version in a torch without CUDA

    major, minor, patch = nccl.version()[:3]  # type: ignore[no-untyped-call]
    return nccl_version_code(major, minor, patch)


def nccl_version_code(major: int, minor: int, patch: int) -> int:
    """Return the code of a version as defined in NCCL's header, which got more digits with 2.9."""
    return (1000 if (major, minor) <= (2, 8) else 10_000) * major + 100 * minor + patch


def ddl_built(verbose: bool = False) -> bool:
    """Return whether IBM's DDL can be used. Always False.

    See the example of `gloo_built`.

    Args:
        verbose: Accepted for Horovod's scripts.
    """
    return False


def ccl_built(verbose: bool = False) -> bool:
    """Return whether Intel's oneCCL can be used. Always False.

    See the example of `gloo_built`.

    Args:
        verbose: Accepted for Horovod's scripts.
    """
    return False


def cuda_built(verbose: bool = False) -> bool:
    """Return whether the installed torch has CUDA; it may still find no device.

    See the example of `gloo_built`.

    Args:
        verbose: Accepted for Horovod's scripts.
    """
    return torch.version.cuda is not None


def rocm_built(verbose: bool = False) -> bool:
    """Return whether the installed torch has ROCm; it may still find no device.

    See the example of `gloo_built`.

    Args:
        verbose: Accepted for Horovod's scripts.
    """
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
        "devices": torch.cuda.device_count(),
    }


if __name__ == "__main__":
    print(json.dumps(_describe()))
