"""The process's place in a job: init(), shutdown(), rank(), size() and the related functions."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

import torch

from farandole.base.env import read_horovod_settings
from farandole.base.membership import Placement
from farandole.registry import factory
from farandole.training.collectives import world
from farandole.training.collectives.extension import SomeRanks, extenders
from farandole.training.worker import process_setup
from farandole.training.worker.worker_job import WorkerJob
from farandole.training.worker.worker_process import this_process

logger = logging.getLogger("farandole")


def init(
    comm: Sequence[int] | None = None,
    process_sets: Sequence[SomeRanks] | str | None = None,
    *,
    default_group: bool = False,
) -> None:
    """Join the job that this process was started for. Idempotent.

    Under `farandole run` it waits until all workers of the start have called it; a worker that was started into a
    running job is a world of one until its elastic function is admitted. Under torchrun, mpirun or srun the job has a
    fixed size. A process that was started by hand is a world of one. After shutdown() all workers may call it again.

    Args:
        comm: Horovod's parameter; None, or the ranks of all workers: smaller worlds are process sets here.
        process_sets: A list of ProcessSet to register, the same on all workers; or "dynamic", so that
            add_process_set() may be called later.
        default_group: Also make Farandole the backend of torch.distributed's default group, as
            init_process_group("farandole") does.

    Raises:
        ConfigError: The environment is inconsistent.
        JobEnded: The job is over already.
        ValueError: The process sets differ between workers, contain ranks that the job does not have, or repeat one.
        OSError: The file of HOROVOD_TIMELINE cannot be written.

    Examples:
        >>> fd.init()
        >>> fd.is_initialized()
        True
    """
    if world.is_entered():
        if default_group:
            factory("default group")()
        return
    for each in extenders().values():
        each.begin(process_sets)
    process_setup.keep_freed_memory()
    if level := read_horovod_settings().log_level:
        process_setup.set_log_level(level)
    process_setup.end_loader_processes_at_exit()
    this_process.join()
    factory("meeting")()
    is_newcomer = this_process.job is not None and this_process.job.is_newcomer()
    try:
        _check_comm(comm)
        for each in extenders().values():
            each.entered(is_newcomer)
        if default_group:
            factory("default group")()
    except BaseException:
        shutdown()
        raise


def shutdown() -> None:
    """Leave the world: close the connections to the other workers. Idempotent. All workers may then call init() again.
    The coordinator keeps this worker registered until the process ends.

    See the example of `init`.
    """
    if world.is_entered():
        this_process.leave()


def last_placement() -> Placement | None:
    """Return the current placement, or the last one before shutdown(); None before init()."""
    return world.current().placement if world.is_entered() else this_process.left


def is_initialized() -> bool:
    """Return whether init() was called and shutdown() was not.

    See the example of `init`.
    """
    return world.is_entered()


def job() -> WorkerJob | None:
    """Return the connection to a coordinator; None when alone or under a fixed-size launcher."""
    return this_process.job


def rank() -> int:
    """Return this worker's place among all workers, from 0. It may change with the generation.

    Raises:
        NotInitialized: `init()` was not called.

    Examples:
        >>> fd.init()
        >>> fd.rank(), fd.size()  # a process that was started by hand
        (0, 1)
    """
    return world.current().placement.rank


def size() -> int:
    """Return the current number of workers.

    See the example of `rank`.

    Raises:
        NotInitialized: `init()` was not called.
    """
    here = world.current()
    return here.placement.size if here.told_size is None else here.told_size(here.placement.size)


def local_rank() -> int:
    """Return this worker's place among the workers of its host, from 0 to `local_size() - 1`: the number of its slot.
    So a replacement gets the number of the dead worker. Only while the host has empty slots may it be another, lower
    number, and change with the generation: see slot().

    See the example of `rank`.

    Raises:
        NotInitialized: `init()` was not called.
    """
    return world.current().placement.local_rank


def local_size() -> int:
    """Return the number of workers on this host. For a worker that is not admitted yet, `local_rank() + 1`.

    See the example of `rank`.

    Raises:
        NotInitialized: `init()` was not called.
    """
    return world.current().placement.local_size


def cross_rank() -> int:
    """Return the place of this worker's host among the hosts that have a worker of the same local rank.

    See the example of `rank`.

    Raises:
        NotInitialized: `init()` was not called.
    """
    return world.current().placement.cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a worker of this local rank.

    See the example of `rank`.

    Raises:
        NotInitialized: `init()` was not called.
    """
    return world.current().placement.cross_size


def is_homogeneous() -> bool:
    """Return whether every host has the same number of workers.

    See the example of `rank`.

    Raises:
        NotInitialized: `init()` was not called.
    """
    return world.current().is_homogeneous


def slot() -> int:
    """Return this worker's slot on its host. A worker keeps its slot, and so its device, for life; the replacement of a
    dead worker gets the dead worker's slot.

    See the example of `device`.

    Raises:
        NotInitialized: `init()` was not called.
    """
    world.current()
    return this_process.slot


def device() -> torch.device:
    """Return the device of this worker's slot: the CUDA device of that number.

    A worker that sees a single device, of its own or a shared one, gets that one. A worker gets the CPU where torch
    finds no device, and, with a warning, where there are several devices but none of its number.

    Raises:
        NotInitialized: `init()` was not called.

    Examples:
        >>> model = torch.nn.Linear(2, 1).to(fd.device())
    """
    number = slot()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 1 or number < count:
        return torch.device("cuda", number if count > 1 else 0)
    if count:
        _warn_of_missing_device(number, count)
    return torch.device("cpu")


@cache
def _warn_of_missing_device(number: int, count: int) -> None:
    """Warn once that a worker computes on the CPU of a host that has devices."""
    logger.warning(
        "the worker in slot %d computes on the CPU, since it sees %d CUDA devices, and none of its number: give the "
        "host no more slots than devices, or each worker a device of its own in CUDA_VISIBLE_DEVICES",
        number,
        count,
    )


def generation() -> int:
    """Return the number of the current generation, from 1; it grows with each change of the membership.

    See the example of `rank`.

    Raises:
        NotInitialized: `init()` was not called.
    """
    return world.current().id.number


def _check_comm(comm: Sequence[int] | None) -> None:
    everybody = list(range(size()))
    if comm is not None and list(comm) != everybody:
        raise ValueError(
            f"init(comm={list(comm)}): this job has ranks {everybody}; for a subset use "
            f"init(process_sets=[ProcessSet({list(comm)})])"
        )
