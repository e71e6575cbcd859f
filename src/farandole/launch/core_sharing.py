"""The division of a host's cores among its workers. Without it, torch starts as many threads in every worker as the
host has cores, and they wait for each other's cores: four workers on 2 cores took several times as long. Used by
local.py and remote_agent.py.

The part of each worker follows from the slots, not from the running workers: a pool of threads keeps its size, and
workers that are added later (`--max-np`, `farandole scale`, a discovery script) must find their cores free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from farandole.config import JobConfig
from farandole.cores import affinity_cores, usable_cores
from farandole.events import CoresShared, Event

_THREADS = "OMP_NUM_THREADS"  # read by OpenMP, and by MKL and OpenBLAS where they have no variable of their own
_OF_THE_USER = (_THREADS, "MKL_NUM_THREADS")  # read by torch's thread pool: ATen/ParallelOpenMP.cpp


def share_cores(environment: Mapping[str, str], workers: int, on_event: Callable[[Event], None]) -> dict[str, str]:
    """Return the environment for `workers` workers of this host: `environment`, and OMP_NUM_THREADS unless the user has
    set the number of threads.

    Args:
        environment: the workers' environment, including the user's part of it.
        workers: the most workers that train on this host at once.
        on_event: gets CoresShared if OMP_NUM_THREADS was added.
    """
    usable = usable_cores()
    threads = threads_of_each(workers, usable, affinity_cores())
    if threads is None or any(name in environment for name in _OF_THE_USER):
        return dict(environment)
    on_event(CoresShared(workers, usable, threads))
    return {**environment, _THREADS: str(threads)}


def threads_of_each(workers: int, usable: int, seen: int) -> int | None:
    """Return the number of threads of each worker; None where torch decides, which counts hyperthreads separately: one
    worker has all the cores.

    Args:
        usable: cores that the workers may use together.
        seen: cores as counted by torch, which ignores CPU quotas.
    """
    threads = max(1, usable // workers)
    return threads if threads < seen else None


def workers_at_most(config: JobConfig, slots: int) -> int:
    """Return the most workers of this job that train at once in `slots` slots of one host, at least 1. Spares wait, and
    need no cores."""
    if config.max_np is not None:
        most = config.max_np
    else:
        most = slots if config.may_change else config.num_proc
    return max(1, min(slots - config.spares, most))
