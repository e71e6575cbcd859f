"""HOROVOD_ variables: the user's settings, and the values that Horovod passes to a worker."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from farandole.env.env_values import amount, is_set, seconds, whole_number
from farandole.errors import ConfigError

if TYPE_CHECKING:
    from farandole.membership import Placement  # an import for which --help should not wait


@dataclass(frozen=True)
class HorovodSettings:
    """The user's settings in HOROVOD_ variables, with Horovod's defaults.

    timeline              file of the timeline; None: none, or not yet
    timeline_is_armed     start_timeline() may be called later (also when a file is given)
    mark_cycles           the timeline shows each round of negotiation
    stall_check           warn of operations that some ranks have not submitted
    stall_warning_s       seconds until the warning
    stall_shutdown_s      seconds until they end with an error; None: never
    dynamic_process_sets  process sets may be added after init()
    fusion_bytes          bytes of small tensors that are reduced together
    cache_capacity        number of negotiated operations that are cached; 0: none
    log_level             "trace", "debug", "info", "warning", "error" or "fatal"; None: as set by the script
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


def read_horovod_settings(environ: Mapping[str, str] | None = None) -> HorovodSettings:
    """Return the user's current HOROVOD_ settings: scripts set them in os.environ just before init(). An empty variable
    counts as not set. Raises ConfigError for a value that makes no sense."""
    environ = os.environ if environ is None else environ
    default = HorovodSettings()
    timeline = environ.get("HOROVOD_TIMELINE") or None
    shutdown_s = seconds(environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0)
    level = environ.get("HOROVOD_LOG_LEVEL", "").lower() or None
    if level is not None and level not in _LOG_LEVELS:
        raise ConfigError(f"HOROVOD_LOG_LEVEL must be one of {', '.join(_LOG_LEVELS)}, got {level!r}")
    return HorovodSettings(
        timeline=None if timeline == "DYNAMIC" else timeline,
        timeline_is_armed=timeline is not None,
        mark_cycles=is_set(environ, "HOROVOD_TIMELINE_MARK_CYCLES"),
        stall_check=not is_set(environ, "HOROVOD_STALL_CHECK_DISABLE"),
        stall_warning_s=seconds(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS", default.stall_warning_s),
        stall_shutdown_s=shutdown_s or None,
        dynamic_process_sets=is_set(environ, "HOROVOD_DYNAMIC_PROCESS_SETS"),
        fusion_bytes=amount(environ, "HOROVOD_FUSION_THRESHOLD", default.fusion_bytes),
        cache_capacity=amount(environ, "HOROVOD_CACHE_CAPACITY", default.cache_capacity),
        log_level=level,
    )


def read_start_timeout_s(default: float, environ: Mapping[str, str] | None = None) -> float:
    """Return HOROVOD_START_TIMEOUT: the launcher's time limit in seconds for all workers' init(), unless
    --start-timeout is given."""
    return seconds(os.environ if environ is None else environ, "HOROVOD_START_TIMEOUT", default)


def horovod_environment(placement: Placement, host: str, is_elastic: bool) -> dict[str, str]:
    """Return the variables that Horovod sets for a worker: the place that it will most likely get, the name that its
    host was given, and whether workers may come and go."""
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


def read_rank_and_size(environ: Mapping[str, str] | None = None) -> tuple[int, int]:
    """Return the rank and size with which a process was started, by our own launcher or through MPI; (0, 1) without
    one. Raises RuntimeError when only one of the two is set."""
    environ = os.environ if environ is None else environ
    for prefix in ("HOROVOD_", "OMPI_COMM_WORLD_", "PMI_"):
        said = [name for name in (prefix + "RANK", prefix + "SIZE") if name in environ]
        if len(said) == 1:
            raise RuntimeError(f"the environment has {said[0]}, but not the other one of {prefix}RANK and {prefix}SIZE")
        if said:
            return whole_number(environ, said[0]), whole_number(environ, said[1])
    return 0, 1


_LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")
