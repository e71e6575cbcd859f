"""The division of a host's resources among its workers: cores, and open descriptors."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping

from farandole.base.events.event import Event
from farandole.base.events.host_events import CoresShared
from farandole.base.machine import affinity_cores, usable_cores
from farandole.errors import ConfigError

# Cores ----------------------------------------------------------------------------------------------------------------

_THREADS = "OMP_NUM_THREADS"  # read by OpenMP, and by MKL and OpenBLAS where they have no variable of their own
_OF_THE_USER = (_THREADS, "MKL_NUM_THREADS")  # read by torch's thread pool: ATen/ParallelOpenMP.cpp


def share_cores(environment: Mapping[str, str], workers: int, on_event: Callable[[Event], None]) -> dict[str, str]:
    """Return the environment for `workers` workers of this host: `environment`, and OMP_NUM_THREADS unless the user has
    set the number of threads; `on_event` gets CoresShared if it was added."""
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


# Open descriptors, from the start of a job to its last regroup --------------------------------------------------------
#
# A launcher has some 12 descriptors, and 6 for each of its workers: two pipes, the connection, two for its status
# page, and one that signals its exit; and some connections of each worker to the store of torch.distributed. A lost
# worker's descriptors are closed before its replacement's are opened, except pipes that a process that escaped from the
# worker holds open for a moment. A worker has some 20 of its own,
# however many workers there are, and a few more while one generation ends and the next one begins. The limits below
# hold for the peak of a regroup, so that a job that starts does not fail later for lack of descriptors.

_OF_THE_LAUNCHER = 64
_FOR_EACH_WORKER = 16
_OF_A_WORKER = 128  # which inherits the limit: most of it for the script's files and its loader workers


def descriptors_needed(workers: int) -> int:
    """Return the limit of descriptors that a launcher of `workers` workers, and each of them, needs."""
    return max(_OF_A_WORKER, _OF_THE_LAUNCHER + _FOR_EACH_WORKER * workers)


def reserve_descriptors(workers: int) -> None:
    """Raise this process's soft limit of open files to what a job of `workers` workers on this machine needs, unless it
    is as high already. The workers inherit it.

    Raises:
        ConfigError: the hard limit is lower than that.
    """
    needed = descriptors_needed(workers)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"a job of {workers} workers needs {needed} open files in one process, and the hard limit is {hard} "
            f"(ulimit -Hn): raise the limit (ulimit -n, limits.conf, LimitNOFILE=, docker run --ulimit nofile=), "
            f"or start fewer workers on this machine"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
