"""The process's place in a job: init(), shutdown(), rank(), size() and the related functions."""

from __future__ import annotations

import atexit
import logging
import sys
import traceback
from collections.abc import Sequence
from functools import cache
from types import TracebackType

import torch

from farandole.base.env import read_exit_notice, read_fixed_env, read_horovod_settings, read_worker_env
from farandole.base.liveness import status_reporting
from farandole.base.membership import GenerationId, Placement
from farandole.base.wire.link_messages import Failed
from farandole.errors import JobEnded
from farandole.registry import factory
from farandole.training.collectives import world
from farandole.training.collectives.alone import AloneTransport
from farandole.training.collectives.extension import SomeRanks, extenders
from farandole.training.collectives.transport import Transport
from farandole.training.collectives.world import World
from farandole.training.state.session import SESSION
from farandole.training.worker import process_setup
from farandole.training.worker.fixed_job import FixedJob
from farandole.training.worker.worker_job import WorkerJob

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


# The process, from its start to its end -------------------------------------------------------------------------------

CONNECT_TIMEOUT_S = 120.0
"""For all ranks, under a fixed-size launcher, to import torch and call init(); as --start-timeout."""

_TRACEBACK_LIMIT = 100_000  # characters; the end holds the most information


class WorkerProcess:
    """What this process is from its start to its end: a worker of a job with a coordinator, of one of fixed size, or
    alone.

    Attributes:
        job: The connection to a coordinator; None when alone or under a fixed-size launcher.
        slot: The number of its slot on its host.
        left: The last placement before shutdown().
    """

    def __init__(self) -> None:
        self.job: WorkerJob | None = None
        self.slot = 0
        self.left: Placement | None = None
        self._fixed: FixedJob | None = None

    def join(self) -> None:
        """Enter the world that the environment describes, for the first time or again."""
        if self._membership is None:
            self._read_environment()
        if self._membership is None or not self._membership.meet():
            self._enter_alone()

    @property
    def _membership(self) -> WorkerJob | FixedJob | None:
        return self.job or self._fixed

    def _read_environment(self) -> None:
        worker_env = read_worker_env()
        # torchrun's variables of a worker are for its script.
        fixed_env = read_fixed_env() if worker_env is None else None
        if worker_env is not None:
            self.slot = worker_env.slot
            if worker_env.status_page:
                status_reporting.open_status_page(worker_env.status_page, gives_exit_notice=read_exit_notice())
            if worker_env.scratch_folder:
                process_setup.use_scratch_folder(worker_env.scratch_folder)
            self.job = WorkerJob(worker_env)
            atexit.register(self._end)
            _report_exceptions(self.job)
            process_setup.name_what_holds_the_exit(lambda: self.job is not None and not self.job.has_finished)
            SESSION.may_save = self.job.may_publish
        elif fixed_env is not None and fixed_env.size > 1:
            self.slot = fixed_env.local_rank
            self._fixed = FixedJob(fixed_env, CONNECT_TIMEOUT_S)
            atexit.register(self._end)

    def leave(self) -> None:
        """Leave the current world, for shutdown(). A forked child only forgets it."""
        here = world.current()
        self.left = here.placement
        if world.is_forked_child():
            world.enter(None)
            return
        if self._membership is not None:
            self._membership.leave()
        else:
            world.enter(None)
            here.close()
        for each in extenders().values():
            each.left()

    def _enter_alone(self) -> None:
        nobody = GenerationId(run_id=1, coordinator_epoch=1, number=0, nonce="alone")
        placement = Placement(0, 1, self.slot, self.slot + 1, 0, 1)  # a newcomer's device is not a live worker's
        extensions = {name: each.extend(AloneTransport(), placement, _refuse) for name, each in extenders().items()}
        world.enter(World(nobody, placement, AloneTransport(), extensions))

    def _end(self) -> None:
        """Leave the job at exit: no call may follow. A forked child has no job to leave."""
        if world.is_forked_child():
            return
        if world.is_entered():
            self.leave()
        SESSION.may_save = None
        if self._membership is not None:
            self._membership.close()
        self.job = self._fixed = None
        process_setup.shorten_exit()


this_process = WorkerProcess()


def _refuse(ranks: tuple[int, ...], number: int) -> Transport:
    raise AssertionError(f"a world of one has no connections, requested number {number}, of ranks {ranks}")


def _report_exceptions(job: WorkerJob) -> None:
    """Report to the coordinator an exception that ends this worker, so that it knows more than an exit code."""
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if world.is_forked_child():
            show(kind, error, trace)
            return
        if isinstance(error, JobEnded):
            return  # The job's end has a reported reason; a traceback from each worker would only hide it.
        summary = _in_one_line(traceback.format_exception_only(kind, error)[-1].strip()).rstrip(".")
        text = "".join(traceback.format_exception(kind, error, trace))
        job.link.send(Failed(summary[:1_000], text[-_TRACEBACK_LIMIT:]))
        show(kind, error, trace)

    sys.excepthook = hook


def _in_one_line(summary: str) -> str:
    """Return the first line; from torch's report of a loader worker's exception the last one, which is the
    exception."""
    lines = [line.strip() for line in summary.splitlines() if line.strip()]
    if not lines:
        return summary
    return lines[-1] if any(line.startswith("Original Traceback") for line in lines) else lines[0]
