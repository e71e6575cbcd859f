"""MPI as a launcher: not in Farandole, which starts workers itself. `mpirun python train.py` still works."""

from __future__ import annotations

from typing import NoReturn

_OMPI_IMPL, _SMPI_IMPL, _MPICH_IMPL, _IMPI_IMPL = "OpenMPI", "SpectrumMPI", "MPICH", "IntelMPI"
_UNKNOWN_IMPL, _MISSING_IMPL = "Unknown", "Missing"
_LARGE_CLUSTER_THRESHOLD = 64


def mpi_available(env: object = None) -> bool:
    """Return False: no process here is started through MPI."""
    return False


def mpi_run(*_: object, **__: object) -> NoReturn:
    """Raise RuntimeError, whose message gives the alternative."""
    raise RuntimeError(
        "Farandole starts workers itself and not through MPI: leave out --mpi or use_mpi, or start the script with "
        "mpirun, as a job of fixed size"
    )


def _get_mpi_implementation(env: object = None) -> str:
    return _MISSING_IMPL


def _get_mpi_implementation_flags(tcp_flag: object = None, env: object = None) -> tuple[None, None, None]:
    return None, None, None
