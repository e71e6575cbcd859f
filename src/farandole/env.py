"""The only reader of os.environ: what an agent or another launcher told this process."""

from __future__ import annotations

import contextlib
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from farandole.errors import ConfigError
from farandole.membership import Placement

_PREFIX = "FARANDOLE_"

# What tells a process its place in one job of Horovod; not for the workers of another one.
_HOROVOD_PLACE = frozenset(
    "HOROVOD_" + name
    for name in (
        *("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME", "ELASTIC"),
        *("RENDEZVOUS_ADDR", "RENDEZVOUS_PORT", "GLOO_RENDEZVOUS_ADDR", "GLOO_RENDEZVOUS_PORT", "SECRET_KEY"),
    )
)


@dataclass(frozen=True)
class WorkerEnv:
    """What an agent tells a worker: where it listens, the worker's name and secret, and its slot."""

    agent_address: str
    worker: str
    secret: str
    slot: int


@dataclass(frozen=True)
class CheckpointEnv:
    """What a job's launcher tells its workers of checkpoints.

    folder  where they are     keep    how many of them
    every   how often: the text of --checkpoint-every
    resume  name of the one to begin with; empty: at the beginning
    """

    folder: str
    every: str
    keep: int
    resume: str = ""


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


@dataclass(frozen=True)
class HorovodSettings:
    """What a user sets with HOROVOD_ variables, in Horovod's defaults.

    timeline              file that the timeline is written to; None: none, or not yet
    timeline_is_armed     start_timeline() may be called later (also when a file is given)
    mark_cycles           the timeline shows each round of negotiation
    stall_check           warn of operations that some ranks have not submitted
    stall_warning_s       after so many seconds
    stall_shutdown_s      and end them with an error after so many; None: never
    dynamic_process_sets  process sets may be added after init()
    fusion_bytes          so many bytes of small tensors are reduced as one
    cache_capacity        so many negotiated operations are remembered; 0: none
    log_level             "trace", "debug", "info", "warning", "error" or "fatal"; None: as the script has it
    """

    timeline: str | None = None
    timeline_is_armed: bool = False
    mark_cycles: bool = False
    stall_check: bool = True
    stall_warning_s: float = 60.0
    stall_shutdown_s: float | None = None
    dynamic_process_sets: bool = False
    fusion_bytes: int = 64 << 20
    cache_capacity: int = 1024
    log_level: str | None = None


def worker_environment(agent_address: str, worker: str, secret: str, slot: int) -> dict[str, str]:
    """The variables that read_worker_env() reads."""
    return {
        "FARANDOLE_AGENT": agent_address,
        "FARANDOLE_WORKER": worker,
        "FARANDOLE_SECRET": secret,
        "FARANDOLE_SLOT": str(slot),
    }


def horovod_environment(placement: Placement, host: str, is_elastic: bool) -> dict[str, str]:
    """What Horovod tells a worker when it starts it: the place that it will most likely get, the name that its
    host was given, and whether the job is an elastic one."""
    return {
        "HOROVOD_RANK": str(placement.rank),
        "HOROVOD_SIZE": str(placement.size),
        "HOROVOD_LOCAL_RANK": str(placement.local_rank),
        "HOROVOD_LOCAL_SIZE": str(placement.local_size),
        "HOROVOD_CROSS_RANK": str(placement.cross_rank),
        "HOROVOD_CROSS_SIZE": str(placement.cross_size),
        "HOROVOD_HOSTNAME": host,
        "HOROVOD_ELASTIC": "1" if is_elastic else "0",
    }


def scratch_environment(folder: str) -> dict[str, str]:
    """The variable that read_scratch_folder() reads."""
    return {"FARANDOLE_SCRATCH": folder}


def read_scratch_folder(environ: Mapping[str, str] = os.environ) -> str | None:
    """A folder that the agent removes with the job, also when this process is killed; None without an agent."""
    return environ.get("FARANDOLE_SCRATCH")


def sample_ledger_environment(folder: str) -> dict[str, str]:
    """The variable that read_sample_ledger() reads."""
    return {"FARANDOLE_SAMPLE_LEDGER": folder}


def read_sample_ledger(environ: Mapping[str, str] = os.environ) -> str | None:
    """The folder in which workers write down what they train; None: nobody asked for that."""
    return environ.get("FARANDOLE_SAMPLE_LEDGER") or None


def checkpoint_environment(settings: CheckpointEnv) -> dict[str, str]:
    """The variables that read_checkpoint_env() reads."""
    return {
        "FARANDOLE_CHECKPOINT": settings.folder,
        "FARANDOLE_CHECKPOINT_EVERY": settings.every,
        "FARANDOLE_CHECKPOINT_KEEP": str(settings.keep),
        "FARANDOLE_CHECKPOINT_RESUME": settings.resume,
    }


def read_checkpoint_env(environ: Mapping[str, str] = os.environ) -> CheckpointEnv | None:
    """None when the job writes no checkpoints."""
    if "FARANDOLE_CHECKPOINT" not in environ:
        return None
    return CheckpointEnv(
        folder=environ["FARANDOLE_CHECKPOINT"],
        every=environ["FARANDOLE_CHECKPOINT_EVERY"],
        keep=_number(environ, "FARANDOLE_CHECKPOINT_KEEP"),
        resume=environ["FARANDOLE_CHECKPOINT_RESUME"],
    )


def inherited_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """This process's environment for its children, without what an outer job said to it."""
    return {
        name: value for name, value in environ.items() if not name.startswith(_PREFIX) and name not in _HOROVOD_PLACE
    }


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
    are missing, are not numbers, or contradict each other."""
    for launcher, names in _LAUNCHERS.items():
        if all(name in environ for name in names.marks):
            return _read(environ, launcher, names)
    return None


def read_horovod_settings(environ: Mapping[str, str] | None = None) -> HorovodSettings:
    """The user's HOROVOD_ settings, as they are now: scripts set them in os.environ just before init(). A variable
    that is empty counts as not set. Raises ConfigError for a value that cannot be meant."""
    environ = os.environ if environ is None else environ
    default = HorovodSettings()
    timeline = environ.get("HOROVOD_TIMELINE") or None
    shutdown_s = _seconds(environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0)
    level = environ.get("HOROVOD_LOG_LEVEL", "").lower() or None
    if level is not None and level not in _LOG_LEVELS:
        raise ConfigError(f"HOROVOD_LOG_LEVEL must be one of {', '.join(_LOG_LEVELS)}, got {level!r}")
    return HorovodSettings(
        timeline=None if timeline == "DYNAMIC" else timeline,
        timeline_is_armed=timeline is not None,
        mark_cycles=_is_set(environ, "HOROVOD_TIMELINE_MARK_CYCLES"),
        stall_check=not _is_set(environ, "HOROVOD_STALL_CHECK_DISABLE"),
        stall_warning_s=_seconds(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS", default.stall_warning_s),
        stall_shutdown_s=shutdown_s or None,
        dynamic_process_sets=_is_set(environ, "HOROVOD_DYNAMIC_PROCESS_SETS"),
        fusion_bytes=_amount(environ, "HOROVOD_FUSION_THRESHOLD", default.fusion_bytes),
        cache_capacity=_amount(environ, "HOROVOD_CACHE_CAPACITY", default.cache_capacity),
        log_level=level,
    )


def read_rank_and_size(environ: Mapping[str, str] | None = None) -> tuple[int, int]:
    """The rank and size that a process was started with, by our own launcher or through MPI; (0, 1) without one.
    Raises RuntimeError when only one of the two was said."""
    environ = os.environ if environ is None else environ
    for prefix in ("HOROVOD_", "OMPI_COMM_WORLD_", "PMI_"):
        said = [name for name in (prefix + "RANK", prefix + "SIZE") if name in environ]
        if len(said) == 1:
            raise RuntimeError(f"the environment has {said[0]}, but not the other one of {prefix}RANK and {prefix}SIZE")
        if said:
            return _number(environ, said[0]), _number(environ, said[1])
    return 0, 1


@contextlib.contextmanager
def changed_environment(**variables: str | None) -> Iterator[None]:
    """Inside, this process's environment has these variables too, except those whose value is None."""
    new = {name: value for name, value in variables.items() if value is not None}
    before = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def uses_agent_store(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun's agent serves the store at MASTER_ADDR:MASTER_PORT already."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def restart_count(environ: Mapping[str, str] = os.environ) -> int:
    """How often torchrun has started all workers anew: its store keeps what the earlier ones said."""
    return _number(environ, "TORCHELASTIC_RESTART_COUNT") if "TORCHELASTIC_RESTART_COUNT" in environ else 0


@dataclass(frozen=True)
class _Names:
    """The variables of one launcher.

    marks               what only this launcher's processes have; all of it
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


# In the order in which they are tried. A launcher may itself run under Slurm: Hydra starts its own helpers with
# srun, and then the SLURM_ variables of a worker are those of the helper.
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
    "mpirun": _Names(  # Hydra: MPICH and Intel MPI
        marks=("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
    ),
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
    "a launcher that speaks PMI": _Names(
        marks=("PMI_RANK", "PMI_SIZE"),
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
    ),
}


def _read(environ: Mapping[str, str], launcher: str, names: _Names) -> FixedEnv:
    needed = (names.rank, names.size, names.local_rank, names.local_size)
    missing = [name for name in needed if name not in environ]
    if missing:
        raise ConfigError(f"the environment looks like that of {launcher} but lacks {', '.join(missing)}")
    rank, size, local_rank = (_number(environ, name) for name in needed[:3])
    host = _number(environ, names.host) if names.host and names.host in environ else None
    local_size = _local_size(environ, names.local_size, host or 0)
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        said = ", ".join(f"{name}={environ[name]}" for name in needed)
        raise ConfigError(f"{launcher} said {said}, which contradict each other")
    if local_size < size and "MASTER_ADDR" not in environ:
        raise ConfigError(
            f"{size} workers on several hosts under {launcher}: set MASTER_ADDR to the address of the host of "
            f"rank 0, so that they find each other"
        )
    hosts = _number(environ, names.hosts) if names.hosts and names.hosts in environ else -(-size // local_size)
    return FixedEnv(
        launcher=launcher,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        cross_rank=rank // local_size if host is None else host,
        cross_size=hosts,
        master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_master_port(environ, launcher, names, is_one_host=local_size == size),
    )


def _local_size(environ: Mapping[str, str], name: str, host: int) -> int:
    """How many workers host number `host` has, from "4" (all hosts, or this one) or from "2(x3),1" (each host)."""
    sizes: list[int] = []
    for part in environ[name].split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(f"{name} must be a whole number, or a list such as 2(x3),1, got {environ[name]!r}")
        sizes += [int(match[1])] * int(match[2] or 1)
    if len(sizes) == 1:
        return sizes[0]
    if host >= len(sizes):
        raise ConfigError(f"{name}={environ[name]} has no host number {host}")
    return sizes[host]


def _master_port(environ: Mapping[str, str], launcher: str, names: _Names, is_one_host: bool) -> int:
    """MASTER_PORT, or one that all ranks of a job arrive at and other jobs, most likely, do not."""
    if "MASTER_PORT" in environ:
        port = _number(environ, "MASTER_PORT")
        if not 0 < port < 65536:
            raise ConfigError(f"MASTER_PORT must be between 1 and 65535, got {port}")
        return port
    identity = ".".join(environ[name] for name in names.job if name in environ)
    if not identity and not is_one_host:
        raise ConfigError(f"several hosts under {launcher}: set MASTER_PORT to a free port of the host of rank 0")
    # Below the ports that the kernel gives to whoever asks for any.
    return 20_000 + zlib.crc32((identity or str(_launcher_pid())).encode()) % 12_000


def _launcher_pid() -> int:
    """The process that started all ranks of this host. Hydra makes each rank the leader of a session; a script
    around the training then is the leader, and this process its child."""
    leader = os.getsid(0)
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{leader}/stat").read_text().rpartition(")")[2].split()[1])
    return os.getppid()  # No /proc: then only without such a script.


_LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")


def _is_set(environ: Mapping[str, str], name: str) -> bool:
    """Numbers are what Horovod reads here; words are what people write."""
    text = environ.get(name, "").strip().lower()
    if text in ("", "0", "false", "no", "off"):
        return False
    if text in ("1", "true", "yes", "on") or text.isdigit():
        return True
    raise ConfigError(f"{name} must be 0 or 1, got {environ[name]!r}")


def _amount(environ: Mapping[str, str], name: str, default: int) -> int:
    number = _number(environ, name) if environ.get(name) else default
    if number < 0:
        raise ConfigError(f"{name} must not be negative, got {number}")
    return number


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{name} must be a number of seconds >= 0, got {text!r}")
    return value


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(f"{name} must be a whole number, got {environ[name]!r}") from None
