"""Variables from torchrun, mpirun and srun to a process of a job of fixed size."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from farandole.base.env.agent_env import Port, Seconds, WholeNumber, read_value
from farandole.base.env.cluster_variables import each_node
from farandole.errors import ConfigError


@dataclass(frozen=True)
class FixedEnv:
    """The place of a process in a job of fixed size, from torchrun, mpirun or srun."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    master_addr: str
    master_port: int


def read_fixed_env(environ: Mapping[str, str] = os.environ) -> FixedEnv | None:
    """Return None when none of torchrun, mpirun and srun started this process. Raises ConfigError for variables that
    are missing, are not numbers, or contradict each other."""
    for launcher, names in _LAUNCHERS.items():
        if all(name in environ for name in names.marks):
            return _read(environ, launcher, names)
    return None


def uses_agent_store(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun's agent serves the store at MASTER_ADDR:MASTER_PORT already."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def restart_count(environ: Mapping[str, str] = os.environ) -> int:
    """Return how often torchrun has restarted all workers: its store keeps the entries of the earlier ones."""
    count: int = read_value(environ, "TORCHELASTIC_RESTART_COUNT", WholeNumber, default=0)
    return count


def run_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return the name by which torchrun tells its runs apart (--rdzv-id); empty under other launchers."""
    return environ.get("TORCHELASTIC_RUN_ID", "")


@dataclass(frozen=True)
class _Names:
    """The variables of one launcher.

    marks               variables that only this launcher's processes have, all of them
    local_size          of this host, as a number; or, of all hosts, as Slurm writes it: "2(x3),1"
    host, hosts         this host's place among the hosts and their number, where the launcher tells
    job                 tells jobs on one machine apart where no port is given
    """

    marks: tuple[str, ...]
    rank: str
    size: str
    local_rank: str
    local_size: str
    host: str | None = None
    hosts: str | None = None
    job: tuple[str, ...] = ()


_PMI = _Names(
    marks=("PMI_RANK", "PMI_SIZE"),
    rank="PMI_RANK",
    size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_size="MPI_LOCALNRANKS",
)

# In the order of the attempts. A launcher may itself run under Slurm: Hydra starts its own helpers with srun, and then
# the SLURM_ variables of a worker are those of the helper.
_LAUNCHERS = {
    "torchrun": _Names(
        marks=("RANK", "WORLD_SIZE", "MASTER_PORT"),
        rank="RANK",
        size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_size="LOCAL_WORLD_SIZE",
        host="GROUP_RANK",
        hosts="GROUP_WORLD_SIZE",
    ),
    "Open MPI's mpirun": _Names(
        marks=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        job=("PMIX_NAMESPACE",),
    ),
    "mpirun": replace(_PMI, marks=("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")),  # Hydra: MPICH and Intel MPI
    # A shell of sbatch or salloc has SLURM_PROCID too, but no step.
    "srun": _Names(
        marks=("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        local_size="SLURM_STEP_TASKS_PER_NODE",
        host="SLURM_NODEID",
        hosts="SLURM_STEP_NUM_NODES",
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
    "a launcher with PMI": _PMI,
}


def _read(environ: Mapping[str, str], launcher: str, names: _Names) -> FixedEnv:
    needed = (names.rank, names.size, names.local_rank, names.local_size)
    missing = [name for name in needed if not environ.get(name)]
    if missing:
        raise ConfigError(f"the environment is that of {launcher}, but lacks {', '.join(missing)}")
    rank, size, local_rank = (read_value(environ, name, WholeNumber) for name in needed[:3])
    host = read_value(environ, names.host, WholeNumber) if names.host else None
    # "4": of all hosts, or of this one; "2(x3),1": of each host.
    sizes = each_node(environ[names.local_size], names.local_size)
    if len(sizes) > 1 and (host or 0) >= len(sizes):
        raise ConfigError(f"{names.local_size}={environ[names.local_size]} has no host number {host or 0}")
    local_size = sizes[host or 0] if len(sizes) > 1 else sizes[0]
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        values = ", ".join(f"{name}={environ[name]}" for name in needed)
        raise ConfigError(f"{launcher} set {values}, which contradict each other")
    if local_size < size and "MASTER_ADDR" not in environ:
        raise ConfigError(
            f"{size} workers on several hosts under {launcher}: set MASTER_ADDR to the address of the host of "
            f"rank 0, so that they find each other"
        )
    hosts = read_value(environ, names.hosts, WholeNumber) if names.hosts else None
    return FixedEnv(
        launcher=launcher,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        cross_rank=rank // local_size if host is None else host,
        cross_size=-(-size // local_size) if hosts is None else hosts,
        master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_master_port(environ, launcher, names, is_one_host=local_size == size),
    )


def _master_port(environ: Mapping[str, str], launcher: str, names: _Names, is_one_host: bool) -> int:
    """Return MASTER_PORT, or a port that all ranks of a job compute and other jobs, most likely, do not."""
    port: int | None = read_value(environ, "MASTER_PORT", Port)
    if port is not None:
        return port
    identity = ".".join(environ[name] for name in names.job if name in environ)
    if not identity and not is_one_host:
        raise ConfigError(f"several hosts under {launcher}: set MASTER_PORT to a free port of the host of rank 0")
    # Below the ports that the kernel assigns automatically.
    return 20_000 + zlib.crc32((identity or str(_launcher_pid())).encode()) % 12_000


def _launcher_pid() -> int:
    """Return the process that started all ranks of this host. Hydra makes each rank the leader of a session; a script
    around the training then is the leader, and this process its child."""
    leader = os.getsid(0)
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{leader}/stat").read_text().rpartition(")")[2].split()[1])
    return os.getppid()  # No /proc: correct only without such a script.


# The settings of torchrun's command line in the environment -----------------------------------------------------------


@dataclass(frozen=True)
class TorchrunSettings:
    """The variables that torchrun's command line reads.

    defaults            values of PET_ variables, by the name of the option: {"nnodes": "2"}
    has_threads         OMP_NUM_THREADS is set
    visible_gpus        CUDA_VISIBLE_DEVICES; None: it is not set
    python              PYTHON_EXEC: the interpreter of the workers; None: that of this process
    line_prefix         TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE
    shutdown_timeout_s  TORCH_ELASTIC_SHUTDOWN_TIMEOUT
    has_token           FARANDOLE_TOKEN is set
    """

    defaults: Mapping[str, str]
    has_threads: bool = False
    visible_gpus: str | None = None
    python: str | None = None
    line_prefix: str | None = None
    shutdown_timeout_s: float | None = None
    has_token: bool = False


_PET = "PET_"


def read_torchrun_settings(environ: Mapping[str, str] = os.environ) -> TorchrunSettings:
    """Return the settings of torchrun's command line in the environment. Raises ConfigError for a value that makes no
    sense."""
    return TorchrunSettings(
        defaults={name[len(_PET) :].lower(): value for name, value in environ.items() if name.startswith(_PET)},
        has_threads="OMP_NUM_THREADS" in environ,
        visible_gpus=environ.get("CUDA_VISIBLE_DEVICES"),
        python=environ.get("PYTHON_EXEC") or None,
        line_prefix=environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        shutdown_timeout_s=read_value(environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", Seconds),
        has_token=bool(environ.get("FARANDOLE_TOKEN")),
    )
