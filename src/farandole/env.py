"""The only reader of os.environ: what an agent or another launcher told this process."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from farandole.errors import ConfigError

_PREFIX = "FARANDOLE_"


@dataclass(frozen=True)
class WorkerEnv:
    """What an agent tells a worker: where it listens, the worker's name and secret, and its slot."""

    agent_address: str
    worker: str
    secret: str
    slot: int


@dataclass(frozen=True)
class FixedEnv:
    """What torchrun, mpirun or srun tell a process of a job of fixed size."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    master_addr: str
    master_port: int


def worker_environment(agent_address: str, worker: str, secret: str, slot: int) -> dict[str, str]:
    """The variables that read_worker_env() reads."""
    return {
        "FARANDOLE_AGENT": agent_address,
        "FARANDOLE_WORKER": worker,
        "FARANDOLE_SECRET": secret,
        "FARANDOLE_SLOT": str(slot),
    }


def inherited_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """This process's environment for its children, without what an outer job said to it."""
    return {name: value for name, value in environ.items() if not name.startswith(_PREFIX)}


def read_worker_env(environ: Mapping[str, str] = os.environ) -> WorkerEnv | None:
    """None when no agent started this process. Raises ConfigError when it said only a part."""
    names = ("FARANDOLE_AGENT", "FARANDOLE_WORKER", "FARANDOLE_SECRET", "FARANDOLE_SLOT")
    missing = [name for name in names if name not in environ]
    if len(missing) == len(names):
        return None
    if missing:
        raise ConfigError(f"the environment has some FARANDOLE_ variables but lacks {', '.join(missing)}")
    address, worker, secret, _ = (environ[name] for name in names)
    return WorkerEnv(address, worker, secret, _number(environ, "FARANDOLE_SLOT"))


def read_fixed_env(environ: Mapping[str, str] = os.environ) -> FixedEnv | None:
    """None when none of torchrun, mpirun and srun started this process. Raises ConfigError for variables that
    are not numbers, or that contradict each other."""
    for launcher, names in _LAUNCHERS.items():
        if all(name in environ for name in names.required):
            return _read(environ, launcher, names)
    return None


def uses_agent_store(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun's agent serves the store at MASTER_ADDR:MASTER_PORT already."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def restart_count(environ: Mapping[str, str] = os.environ) -> int:
    """How often torchrun has started all workers anew: its store keeps what the earlier ones said."""
    return _number(environ, "TORCHELASTIC_RESTART_COUNT") if "TORCHELASTIC_RESTART_COUNT" in environ else 0


@dataclass(frozen=True)
class _Names:
    """The variables of one launcher. `job` tells jobs on one machine apart where no port is given."""

    rank: str
    size: str
    local_rank: str
    local_size: str
    host: str | None = None
    job: str | None = None
    also: tuple[str, ...] = ()

    @property
    def required(self) -> tuple[str, ...]:
        return (self.rank, self.size, *self.also)


_LAUNCHERS = {
    "torchrun": _Names(
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", host="GROUP_RANK", also=("MASTER_PORT",)
    ),
    "Open MPI's mpirun": _Names(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        job="PMIX_NAMESPACE",
    ),
    # Outside srun, in a shell of salloc or sbatch, there is no step with tasks.
    "srun": _Names(
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_NTASKS_PER_NODE",
        host="SLURM_NODEID",
        job="SLURM_JOB_ID",
        also=("SLURM_STEP_ID",),
    ),
    "mpirun": _Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


def _read(environ: Mapping[str, str], launcher: str, names: _Names) -> FixedEnv:
    rank, size = _number(environ, names.rank), _number(environ, names.size)
    local_rank = _number(environ, names.local_rank) if names.local_rank in environ else rank
    local_size = _number(environ, names.local_size) if names.local_size in environ else size
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise ConfigError(
            f"{launcher} said {names.rank}={rank}, {names.size}={size}, {names.local_rank}={local_rank}, "
            f"{names.local_size}={local_size}, which contradict each other"
        )
    is_one_host = local_size == size
    if not is_one_host and "MASTER_ADDR" not in environ:
        raise ConfigError(
            f"{size} workers on several hosts under {launcher}: set MASTER_ADDR to the address of the host of "
            f"rank 0, so that they find each other"
        )
    cross_rank = _number(environ, names.host) if names.host and names.host in environ else rank // local_size
    return FixedEnv(
        launcher=launcher,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        cross_rank=cross_rank,
        cross_size=-(-size // local_size),
        master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_master_port(environ, names),
    )


def _master_port(environ: Mapping[str, str], names: _Names) -> int:
    """MASTER_PORT, or one that all ranks of a job arrive at and other jobs, most likely, do not."""
    if "MASTER_PORT" in environ:
        return _number(environ, "MASTER_PORT")
    # Without a name for the job: the ranks on one host have the launcher's process as their parent.
    identity = environ.get(names.job, "") if names.job else str(os.getppid())
    step = environ.get("SLURM_STEP_ID", "")
    return 20_000 + zlib.crc32(f"{identity}.{step}".encode()) % 20_000


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(f"{name} must be a whole number, got {environ[name]!r}") from None
