"""The process's place in a job: init(), shutdown(), rank(), size() and the related functions."""

from __future__ import annotations

import atexit
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from farandole.collectives import world
from farandole.collectives.alone import AloneTransport
from farandole.collectives.named.engine import NamedCollectives
from farandole.collectives.named.process_sets import ProcessSet, forget_all, register_static
from farandole.collectives.named.settings import NamedSettings
from farandole.collectives.named.timeline import start_timeline
from farandole.collectives.transport import Transport
from farandole.env import read_exit_notice, read_fixed_env, read_horovod_settings, read_worker_env
from farandole.errors import JobEnded
from farandole.liveness import status_reporting
from farandole.membership import GenerationId, Placement
from farandole.process_group.registration import open_default_group, register
from farandole.state import object_state
from farandole.wire.messages import Failed
from farandole.worker import process_setup
from farandole.worker.fixed_job import FixedJob
from farandole.worker.process_setup import end_loader_processes_at_exit, keep_freed_memory, shorten_exit
from farandole.worker.worker_job import WorkerJob

# Seconds, under a fixed-size launcher, for all ranks to import torch and call init(); as --start-timeout.
_CONNECT_TIMEOUT_S = 120.0
_TRACEBACK_LIMIT = 100_000  # characters; the end holds the most information

_job: WorkerJob | None = None
_fixed: FixedJob | None = None
_slot = 0
_is_dynamic = False  # init(process_sets="dynamic")


def init(
    comm: Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
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
    """
    global _is_dynamic
    if world.is_entered():
        if default_group:
            open_default_group()
        return
    _is_dynamic = process_sets == "dynamic"
    wanted: list[Any] = [] if process_sets is None or _is_dynamic else list(process_sets)
    if not all(isinstance(each, ProcessSet) for each in wanted):
        raise ValueError(f'init(process_sets={process_sets!r}): expected a list of ProcessSet, or "dynamic"')
    keep_freed_memory()
    if level := read_horovod_settings().log_level:
        process_setup.set_log_level(level)
    end_loader_processes_at_exit()
    _join()
    try:
        _check_comm(comm)
        register_static(wanted, is_newcomer=_job is not None and _job.is_newcomer())
        _start_timeline()
        if default_group:
            open_default_group()
    except BaseException:
        shutdown()
        raise


def shutdown() -> None:
    """Leave the world: close the connections to the other workers. Idempotent. All workers may then call init() again.
    The coordinator keeps this worker registered until the process ends."""
    if not world.is_entered():
        return
    if _job is not None:
        _job.leave()
    elif _fixed is not None:
        _fixed.leave()
    else:
        here = world.current()
        world.enter(None)
        if here.named is not None:
            here.named.close()
    forget_all()


def _join() -> None:
    """Enter the world that the environment describes, for the first time or again."""
    global _job, _fixed, _slot
    if _job is not None:
        if not _job.meet_again():
            _enter_alone()
        return
    if _fixed is not None:
        _fixed.meet_again()
        return
    worker_env, fixed_env = read_worker_env(), read_fixed_env()
    if worker_env is not None:
        _slot = worker_env.slot
        if worker_env.status_page:
            status_reporting.open_status_page(worker_env.status_page, gives_exit_notice=read_exit_notice())
        if worker_env.scratch_folder:
            process_setup.use_scratch_folder(worker_env.scratch_folder)
        _job = WorkerJob(worker_env, _settings)
        atexit.register(_end)
        _report_exceptions(_job)
        object_state.install_saver(_job.may_publish)
        if not _job.meet():
            _enter_alone()
    elif fixed_env is not None and fixed_env.size > 1:
        _slot = fixed_env.local_rank
        _fixed = FixedJob(fixed_env, _settings, _CONNECT_TIMEOUT_S)
        atexit.register(_end)
        _fixed.meet()
    else:
        _enter_alone()


def _end() -> None:
    """Leave the job at exit: no call may follow."""
    global _job, _fixed
    shutdown()
    object_state.install_saver(None)
    for each in (_job, _fixed):
        if each is not None:
            each.close()
    _job = _fixed = None
    shorten_exit()


def is_initialized() -> bool:
    """Return whether init() was called and shutdown() was not."""
    return world.is_entered()


def job() -> WorkerJob | None:
    """Return the connection to a coordinator; None when alone or under a fixed-size launcher."""
    return _job


def rank() -> int:
    """Return this worker's place among all workers, from 0. It may change with the generation."""
    return world.current().placement.rank


def size() -> int:
    """Return the current number of workers."""
    return world.current().placement.size


def local_rank() -> int:
    """Return this worker's place among the workers of its host. It may change with the generation: see slot()."""
    return world.current().placement.local_rank


def local_size() -> int:
    """Return the number of workers on this host."""
    return world.current().placement.local_size


def cross_rank() -> int:
    """Return the place of this worker's host among the hosts that have a worker of the same local rank."""
    return world.current().placement.cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a worker of this local rank."""
    return world.current().placement.cross_size


def is_homogeneous() -> bool:
    """Return whether every host has the same number of workers."""
    return world.current().is_homogeneous


def slot() -> int:
    """Return this worker's slot on its host. A worker keeps its slot, and so its device, for life; the replacement of a
    dead worker gets the dead worker's slot."""
    world.current()
    return _slot


def device() -> torch.device:
    """Return the device of this worker's slot: the CUDA device of that number where there is one, else the CPU."""
    if torch.cuda.is_available() and slot() < torch.cuda.device_count():
        return torch.device("cuda", slot())
    return torch.device("cpu")


def generation() -> int:
    """Return the number of the current generation, from 1; it grows with each change of the membership."""
    return world.current().id.number


def _enter_alone() -> None:
    nobody = GenerationId(run_id=1, coordinator_epoch=1, number=0, nonce="alone")
    placement = Placement(0, 1, 0, 1, 0, 1)
    named = NamedCollectives(AloneTransport(), placement=placement, connect=_no_connection, settings=_settings())
    world.enter(world.World(nobody, placement, AloneTransport(), named))


def _no_connection(ranks: tuple[int, ...], process_set: int) -> Transport:
    raise AssertionError(f"a world of one has no connections, requested ranks {ranks} of process set {process_set}")


def _settings() -> NamedSettings:
    """Return the current settings of the environment: scripts set variables before each init()."""
    settings = read_horovod_settings()
    return NamedSettings(
        cache_capacity=settings.cache_capacity,
        fusion_bytes=settings.fusion_bytes,
        stall_warning_s=0.0 if settings.stall_check_is_off else settings.stall_warning_s,
        stall_abort_s=settings.stall_shutdown_s,
        dynamic_process_sets=settings.dynamic_process_sets or _is_dynamic,
    )


def _start_timeline() -> None:
    """Start the timeline of HOROVOD_TIMELINE. Not in a newcomer: it is a rank 0, too, until it is admitted."""
    settings = read_horovod_settings()
    if settings.timeline_file is not None and not (_job is not None and _job.is_newcomer()):
        start_timeline(settings.timeline_file, settings.mark_cycles)


def _check_comm(comm: Sequence[int] | None) -> None:
    everybody = list(range(size()))
    if comm is not None and list(comm) != everybody:
        raise ValueError(
            f"init(comm={list(comm)}): this job has ranks {everybody}; for a subset use "
            f"init(process_sets=[ProcessSet({list(comm)})])"
        )


def _report_exceptions(job: WorkerJob) -> None:
    """Report to the coordinator an exception that ends this worker, so that it knows more than an exit code."""
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, JobEnded):
            return  # The job's end has a reported reason; a traceback from each worker would only hide it.
        summary = _in_one_line(traceback.format_exception_only(kind, error)[-1].strip())
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


register(init)
