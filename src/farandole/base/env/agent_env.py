"""Variables from an agent and a launcher to the workers of a job: where to report, and where to put files."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct, field
from msgspec.structs import asdict

from farandole.base.config import JobConfig
from farandole.errors import ConfigError

if TYPE_CHECKING:
    from farandole.base.membership import Address, Placement  # an import for which --help should not wait


EXIT_NOTICE = "FARANDOLE_EXIT_NOTICE"


class WorkerEnv(Struct, frozen=True):
    """Settings from an agent to one worker.

    Attributes:
        agent_address: The address of the agent's local socket.
        worker: The name of the worker.
        secret: The secret that the worker sends to the agent.
        slot: The slot of the worker.
        data_addresses: The numeric addresses of this machine at which other workers may reach it, with commas.
        scratch_folder: The folder that the agent removes with the job, also when this process is killed; empty: none.
        detection_budget_s: The detection budget of the job, in seconds.
        status_page: The path of the worker's status page; empty: none.
        store: The address of the job's store, as in MASTER_ADDR and MASTER_PORT, which scripts may change; empty: none.
        group_secret: What the workers of the job share, as 64 hexadecimal digits, for groups that a script makes by
            itself.
        tls: The folder of the job's certificates; empty: connections are not encrypted.
    """

    agent_address: str = field(name="FARANDOLE_AGENT")
    worker: str = field(name="FARANDOLE_WORKER")
    secret: str = field(name="FARANDOLE_SECRET")
    slot: WholeNumber = field(name="FARANDOLE_SLOT")
    data_addresses: str = field(name="FARANDOLE_DATA_ADDRESSES", default="127.0.0.1")
    scratch_folder: str = field(name="FARANDOLE_SCRATCH", default="")
    detection_budget_s: Seconds = field(name="FARANDOLE_DETECTION_BUDGET", default=JobConfig.detection_budget_s)
    status_page: str = field(name="FARANDOLE_PAGE", default="")
    store: str = field(name="FARANDOLE_STORE", default="")
    group_secret: str = field(name="FARANDOLE_GROUP_SECRET", default="")
    tls: str = field(name="FARANDOLE_TLS", default="")

    @property
    def data_hosts(self) -> tuple[str, ...]:
        """`data_addresses`, one by one."""
        return tuple(self.data_addresses.split(","))


BALANCE = "FARANDOLE_BALANCE"
Balancing = Annotated[Literal["auto", "off"], Meta(description="auto or off")]


class JobEnv(Struct, frozen=True, omit_defaults=True):
    """Settings that all workers of a job share, from the launcher or, without one, from the user.

    Attributes:
        transport: The way in which tensors travel between workers: one of transport_choice.CHOICES, or an invalid word.
        sample_ledger: The folder in which workers record the samples that they train; empty: it was not requested.
        in_place: The number of workers at the start, where scripts of torchrun are elastic in place; 0: they are not.
        strict: Whether loaders are strict unless they are given another argument.
        shards: The number of shards of a strict loader that is given none; 0: unknown.
        audit: The fraction of its shards that are computed again, by another worker.
        hash_every: The number of steps from one hash of the state to the next one, in strict mode; 0: at the end of
            each epoch.
        balance: "auto": local batches of loaders that are given nothing else follow the speed of the workers.
    """

    transport: str = field(name="FARANDOLE_TRANSPORT", default="auto")
    sample_ledger: str = field(name="FARANDOLE_SAMPLE_LEDGER", default="")
    in_place: Amount = field(name="FARANDOLE_IN_PLACE", default=0)
    strict: Switch = field(name="FARANDOLE_STRICT", default=False)
    shards: Amount = field(name="FARANDOLE_SHARDS", default=0)
    audit: Fraction = field(name="FARANDOLE_AUDIT", default=0.01)
    hash_every: Amount = field(name="FARANDOLE_HASH_EVERY", default=0)
    balance: Balancing = field(name=BALANCE, default="off")


def read_worker_env(environ: Mapping[str, str] = os.environ) -> WorkerEnv | None:
    """Return None when no agent started this process. Raises ConfigError when only some of the variables are set."""
    return read_variables(environ, WorkerEnv) if has_variables(environ, WorkerEnv) else None


def read_job_env(environ: Mapping[str, str] = os.environ) -> JobEnv:
    """Return the settings that all workers of the job share."""
    return read_variables(environ, JobEnv)


BUCKET_MB = "FARANDOLE_BUCKET_MB"
RECONFIGURE = "FARANDOLE_RECONFIGURE"

# Without it, sums depend on the alignment of operands: measured with torch 2.13 and MKL 2024.2.
# https://www.intel.com/content/www/us/en/docs/onemkl/developer-guide-linux/2024-2/obtaining-numerically-reproducible-results.html
MKL_CBWR, _MKL_CBWR = "MKL_CBWR", "AUTO,STRICT"


def read_bucket_mb(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the least size of a bucket of gradients, in megabytes, as it was written; None: it is chosen
    automatically."""
    return environ.get(BUCKET_MB) or None


def read_reconfigure(environ: Mapping[str, str] = os.environ) -> bool | None:
    """Return whether process groups of torch live through the generations, by FARANDOLE_RECONFIGURE; None: it is not
    set. Raises ConfigError for another value than 0 or 1."""
    value = read_value(environ, RECONFIGURE, Switch, None)
    return None if value is None else bool(value)


def strict_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of strict mode that the user has not set: one thread for each worker, and a result of each
    operation that does not depend on the addresses of its operands."""
    found = {"OMP_DYNAMIC": "FALSE", "MKL_DYNAMIC": "FALSE", MKL_CBWR: _MKL_CBWR}
    if not any(name in environ for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")):
        found["OMP_NUM_THREADS"] = "1"
    return {name: value for name, value in found.items() if name not in environ}


def prepare_for_strict_mode(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the mode of MKL in this process, which reads it at its first operation, unless it is set."""
    environ.setdefault(MKL_CBWR, _MKL_CBWR)


def read_mkl_reproducibility(environ: Mapping[str, str] = os.environ) -> str:
    """Return the mode of MKL's conditional numerical reproducibility; empty: none."""
    return environ.get(MKL_CBWR, "")


def read_token(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the token from FARANDOLE_TOKEN: for an agent that is to join a job, whose workers never inherit it, and
    for processes that another launcher has started."""
    return environ.get("FARANDOLE_TOKEN") or None


def read_exit_notice(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the agent may learn of this process's death before its memory is freed: unless
    FARANDOLE_EXIT_NOTICE is 0, off or false."""
    return environ.get(EXIT_NOTICE, "").lower() not in ("0", "off", "false")


# Checkpoint settings of a worker: from our launcher, or from the user where there is none of ours ---------------------


class CheckpointEnv(Struct, frozen=True):
    """The checkpoints of a job.

    Attributes:
        folder: Their folder, or an address.
        every: Their interval: the text of --checkpoint-every.
        keep: The number of checkpoints to keep.
        resume: The name of the newest one when the job began; empty: it began at the beginning.
        run_id: The run id with which the job began; 0: no process has locked the place yet.
        owner: The process that has locked it.
    """

    folder: str = field(name="FARANDOLE_CHECKPOINT")
    every: str = field(name="FARANDOLE_CHECKPOINT_EVERY", default="10m")
    keep: PositiveAmount = field(name="FARANDOLE_CHECKPOINT_KEEP", default=2)
    resume: str = field(name="FARANDOLE_CHECKPOINT_RESUME", default="")
    run_id: Amount = field(name="FARANDOLE_CHECKPOINT_RUN_ID", default=0)
    owner: str = field(name="FARANDOLE_CHECKPOINT_OWNER", default="")


def read_checkpoint_env(environ: Mapping[str, str] = os.environ) -> CheckpointEnv | None:
    """Return None when the job writes no checkpoints. Raises ConfigError for numbers that make no sense."""
    return read_variables(environ, CheckpointEnv) if has_variables(environ, CheckpointEnv) else None


# HOROVOD_ variables: the user's settings, and the values that Horovod passes to a worker ------------------------------

LogLevel = Annotated[
    Literal["", "trace", "debug", "info", "warning", "error", "fatal"],
    Meta(description="one of trace, debug, info, warning, error, fatal"),
]


class HorovodSettings(Struct, frozen=True):
    """The user's settings in HOROVOD_ variables, with Horovod's defaults.

    Attributes:
        timeline: The file of the timeline; empty: none. DYNAMIC: none yet, start_timeline() is called later.
        mark_cycles: Whether the timeline shows each round of negotiation.
        stall_check_is_off: Whether there are no warnings of operations that some ranks have not submitted.
        stall_warning_s: Seconds until the warning.
        stall_shutdown_s: Seconds until they end with an error; 0: never.
        dynamic_process_sets: Whether process sets may be added after init().
        fusion_bytes: Bytes of small tensors that are reduced together.
        cache_capacity: The number of negotiated operations that are cached; 0: none.
        log_level: The level of the log; empty: as set by the script.
    """

    timeline: str = field(name="HOROVOD_TIMELINE", default="")
    mark_cycles: Switch = field(name="HOROVOD_TIMELINE_MARK_CYCLES", default=False)
    stall_check_is_off: Switch = field(name="HOROVOD_STALL_CHECK_DISABLE", default=False)
    stall_warning_s: Seconds = field(name="HOROVOD_STALL_CHECK_TIME_SECONDS", default=60.0)
    stall_shutdown_s: Seconds = field(name="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", default=0.0)
    dynamic_process_sets: Switch = field(name="HOROVOD_DYNAMIC_PROCESS_SETS", default=False)
    fusion_bytes: Amount = field(name="HOROVOD_FUSION_THRESHOLD", default=64 << 20)
    cache_capacity: Amount = field(name="HOROVOD_CACHE_CAPACITY", default=1024)
    log_level: LogLevel = field(name="HOROVOD_LOG_LEVEL", default="")

    @property
    def timeline_file(self) -> str | None:
        """The file of a timeline that begins with init(); None when there is none."""
        return None if self.timeline in ("", "DYNAMIC") else self.timeline


def read_horovod_settings(environ: Mapping[str, str] | None = None) -> HorovodSettings:
    """Return the user's current HOROVOD_ settings: scripts set them in os.environ just before init(). Raises
    ConfigError for a value that makes no sense."""
    return read_variables(os.environ if environ is None else environ, HorovodSettings)


def read_timeline(environ: Mapping[str, str] | None = None) -> str:
    """Return HOROVOD_TIMELINE, as the launcher's own environment has it; empty: it is not set."""
    return (os.environ if environ is None else environ).get("HOROVOD_TIMELINE", "")


def read_start_timeout_s(default: float, environ: Mapping[str, str] | None = None) -> float:
    """Return HOROVOD_START_TIMEOUT: the launcher's time limit in seconds for all workers' init(), unless
    --start-timeout is given."""
    environ = os.environ if environ is None else environ
    limit_s: float = read_value(environ, "HOROVOD_START_TIMEOUT", Seconds, default)
    return limit_s


class HorovodPlace(Struct, frozen=True, rename=lambda name: "HOROVOD_" + name.upper()):
    """The variables that Horovod sets for a worker: HOROVOD_RANK, HOROVOD_LOCAL_RANK and so on."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    hostname: str
    elastic: int


def horovod_environment(placement: Placement, host: str, is_elastic: bool) -> dict[str, str]:
    """Return the variables that Horovod sets for a worker: the place that it will most likely get, the name that its
    host was given, and whether workers may come and go."""
    return environment_of(HorovodPlace(**asdict(placement), hostname=host, elastic=int(is_elastic)))


# torchrun's variables: what it passes to a worker ---------------------------------------------------------------------


class TorchrunPlace(Struct, frozen=True, rename=str.upper):
    """The variables that torchrun sets for each worker (torch 2.13, LocalElasticAgent._start_workers()), but for
    TORCH_NCCL_ASYNC_ERROR_HANDLING, whose value 1 would have torch end a worker that Farandole can save."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    group_rank: int
    group_world_size: int
    role_rank: int
    role_world_size: int
    role_name: str
    master_addr: str
    master_port: int
    torchelastic_restart_count: int
    torchelastic_max_restarts: int
    torchelastic_run_id: str
    torchelastic_error_file: str = ""
    torchelastic_use_agent_store: bool = True  # no worker may host the store: it would end with that worker


def torchrun_environment(
    placement: Placement,
    store: Address,
    run_id: str,
    *,
    group_rank: int = 0,
    group_size: int = 1,
    attempt: int = 0,
    max_restarts: int = 0,
    role: str = "default",
    error_file: str = "",
) -> dict[str, str]:
    """Return the variables that torchrun sets for a worker: `group_rank`, `group_size` and `attempt` as in Spawn
    (wire/messages.py), `placement` as its `expected`. Torch's `@record` writes the exception that ends the worker into
    `error_file`."""
    return environment_of(
        TorchrunPlace(
            rank=placement.rank,
            local_rank=placement.local_rank,
            world_size=placement.size,
            local_world_size=placement.local_size,
            group_rank=group_rank,
            group_world_size=group_size,
            role_rank=placement.rank,
            role_world_size=placement.size,
            role_name=role,
            master_addr=store.host,
            master_port=store.port,
            torchelastic_restart_count=attempt,
            torchelastic_max_restarts=max_restarts,
            torchelastic_run_id=run_id,
            torchelastic_error_file=error_file,
        )
    )


def set_torchrun_world_size(size: int) -> None:
    """Set the number of workers in torchrun's variables, for scripts that compute batch sizes from it. A worker beyond
    that number, a spare, has the last rank in them: scripts and libraries expect ranks below the number of workers. It
    keeps its local rank, which is the number of its device."""
    os.environ.update({name: str(size) for name in ("WORLD_SIZE", "ROLE_WORLD_SIZE") if name in os.environ})
    for name in ("RANK", "ROLE_RANK"):
        value = os.environ.get(name, "")
        if value.isdecimal() and int(value) >= size:
            os.environ[name] = str(size - 1)
    local_rank, local_size = os.environ.get("LOCAL_RANK", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    if local_rank.isdecimal() and local_size.isdecimal():
        os.environ["LOCAL_WORLD_SIZE"] = str(max(int(local_rank) + 1, min(int(local_size), size)))


def read_torchrun_rank_and_size(environ: Mapping[str, str] | None = None) -> tuple[int, int] | None:
    """Return RANK and WORLD_SIZE of a worker of ours; None in any other process, or where they are no numbers."""
    environ = os.environ if environ is None else environ
    rank, size = environ.get("RANK", ""), environ.get("WORLD_SIZE", "")
    if not has_variables(environ, WorkerEnv) or not (rank.isdecimal() and size.isdecimal()):
        return None
    return int(rank), int(size)


def hide_torchrun_place(environ: MutableMapping[str, str] = os.environ) -> None:
    """Remove torchrun's variables from the environment of a worker of ours, for a library that would follow them: they
    tell the place with which the worker was started, and that of an elastic worker changes."""
    if has_variables(environ, WorkerEnv):
        for name in TorchrunPlace.__struct_encode_fields__:
            environ.pop(name, None)


def read_rank_and_size(environ: Mapping[str, str] | None = None) -> tuple[int, int]:
    """Return the rank and size with which a process was started, by our own launcher or through MPI; (0, 1) without
    one. Raises RuntimeError when only one of the two is set."""
    environ = os.environ if environ is None else environ
    for prefix in ("HOROVOD_", "OMPI_COMM_WORLD_", "PMI_"):
        given = [name for name in (prefix + "RANK", prefix + "SIZE") if environ.get(name)]
        if len(given) == 1:
            raise RuntimeError(f"the environment has {given[0]}, but needs both {prefix}RANK and {prefix}SIZE")
        if given:
            rank, size = (read_value(environ, name, WholeNumber) for name in given)
            return rank, size
    return 0, 1


# Groups of variables --------------------------------------------------------------------------------------------------
#
# Groups of variables as Structs, read from an environment and written to one. Errors name the variable.
#
# The Struct of a group states each variable once: its name in the environment, its type and its default. A variable
# that is empty counts as not set. All readers raise ConfigError for a value that makes no sense.


# The description of a type says in an error what the value must be.
WholeNumber = Annotated[int, Meta(description="a whole number")]
Amount = Annotated[int, Meta(ge=0, description="a whole number >= 0")]
PositiveAmount = Annotated[int, Meta(ge=1, description="a whole number >= 1")]
Port = Annotated[int, Meta(ge=1, le=65535, description="between 1 and 65535")]
Seconds = Annotated[float, Meta(ge=0.0, le=sys.float_info.max, description="a number of seconds >= 0")]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0, description="a number from 0 to 1")]
Switch = Annotated[bool, Meta(description="0 or 1")]

T = TypeVar("T", bound=msgspec.Struct)

# Horovod reads numbers as switches; users also write words. msgspec knows 0, 1, false and true itself.
_SWITCH_WORDS = {"yes": "1", "on": "1", "no": "0", "off": "0"}


def read_variables(environ: Mapping[str, str], group: type[T]) -> T:
    """Return the group's variables. Raises ConfigError also when one without a default is not set."""
    fields = _fields(group)
    missing = [each.encode_name for each in fields if each.required and not environ.get(each.encode_name)]
    if missing:
        prefix = missing[0].partition("_")[0]
        raise ConfigError(f"the environment has some {prefix}_ variables but lacks {', '.join(missing)}")
    return group(**{each.name: read_value(environ, each.encode_name, each.type, each.default) for each in fields})


def has_variables(environ: Mapping[str, str], group: type[msgspec.Struct]) -> bool:
    """Return whether any of the group's variables without a default is set."""
    return any(environ.get(each.encode_name) for each in _fields(group) if each.required)


def environment_of(group: msgspec.Struct) -> dict[str, str]:
    """Return the variables from which read_variables() reads an equal group."""
    return {name: str(value) for name, value in msgspec.to_builtins(group).items()}


def read_value(environ: Mapping[str, str], name: str, type_: Any, default: Any = None) -> Any:
    """Return the value of one variable, or `default` when it is not set."""
    if not environ.get(name, "").strip():
        return default
    text = environ[name] if type_ is str else environ[name].strip().lower()
    if type_ == Switch:
        text = "1" if text.isdecimal() and int(text) else _SWITCH_WORDS.get(text, text)
    try:
        return msgspec.convert(text, type_, strict=False)
    except msgspec.ValidationError:
        raise ConfigError(f"{name} must be {_expected(type_)}, got {environ[name]!r}") from None


@functools.cache
def _fields(group: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(group)


def _expected(type_: Any) -> str:
    return next(str(each.description) for each in get_args(type_) if isinstance(each, Meta))
