"""HOROVOD_ variables: the user's settings, and the values that Horovod passes to a worker."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct, field
from msgspec.structs import asdict

from farandole.env.env_values import (
    Amount,
    Seconds,
    Switch,
    WholeNumber,
    environment_of,
    read_value,
    read_variables,
)

if TYPE_CHECKING:
    from farandole.membership import Placement  # an import for which --help should not wait

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
    """Return the user's current HOROVOD_ settings: scripts set them in os.environ just before init().

    Raises ConfigError for a value that makes no sense."""
    return read_variables(os.environ if environ is None else environ, HorovodSettings)


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
