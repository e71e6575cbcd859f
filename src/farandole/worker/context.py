"""The process's place in a job: init(), shutdown(), and what rank(), size() and their kin answer."""

from __future__ import annotations

import atexit
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from farandole import status_reporting
from farandole.collectives import world
from farandole.collectives.alone import AloneTransport
from farandole.collectives.named.engine import NamedCollectives
from farandole.collectives.named.process_sets import ProcessSet, forget_all, register_static
from farandole.collectives.named.settings import NamedSettings
from farandole.collectives.named.timeline_control import start_timeline
from farandole.collectives.transport import Transport
from farandole.env import (
    read_exit_notice,
    read_fixed_env,
    read_horovod_settings,
    read_page,
    read_scratch_folder,
    read_worker_env,
)
from farandole.errors import JobEnded
from farandole.membership import GenerationId, Placement
from farandole.messages import Failed
from farandole.process_group.registration import open_default_group, register
from farandole.state import save_once
from farandole.worker import logs, scratch
from farandole.worker.children import end_stubborn_at_exit
from farandole.worker.exiting import shorten_exit
from farandole.worker.fixed_job import FixedJob
from farandole.worker.malloc import keep_freed_memory
from farandole.worker.worker_job import Job

# Under a fixed-size launcher, for all ranks to have imported torch and called init(); as --start-timeout.
_CONNECT_TIMEOUT_S = 120.0
_TRACEBACK_LIMIT = 100_000  # characters; its end says most

_job: Job | None = None
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

    Under `farandole run`: waits until all workers of the start have called it; a worker that was started into
    a running job is a world of one until its elastic function is admitted. Under torchrun, mpirun or srun: a
    job of fixed size. Started by hand: a world of one. After shutdown() it may be called again, by all workers.

    comm          Horovod's; None, or the ranks of all workers: smaller worlds are process sets here
    process_sets  a list of ProcessSet to register, the same on all workers; or "dynamic", so that
                  add_process_set() may be called later
    default_group  torch.distributed's default group becomes ours, too, as by init_process_group("farandole")

    Raises ConfigError for an environment that makes no sense, JobEnded when the job is over already, ValueError
    for process sets that are not the same on all workers, are no ranks of this job, or say the same twice, OSError
    when the file of HOROVOD_TIMELINE cannot be written.
    """
    global _is_dynamic
    if world.is_entered():
        if default_group:
            open_default_group()
        return
    _is_dynamic = process_sets == "dynamic"
    wanted: list[Any] = [] if process_sets is None or _is_dynamic else list(process_sets)
    if not all(isinstance(each, ProcessSet) for each in wanted):
        raise ValueError(f'init(process_sets={process_sets!r}): a list of ProcessSet, or "dynamic"')
    keep_freed_memory()
    if (level := read_horovod_settings().log_level) is not None:
        logs.say_from(level)
    end_stubborn_at_exit()
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
    """Leave the world: close the connections to the other workers. Idempotent. init() may follow, on all of them.
    The coordinator goes on knowing this worker until the process ends."""
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
    """Enter the world that the environment says, for the first time or again."""
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
        if (page := read_page()) is not None:
            status_reporting.open_status_page(page, gives_exit_notice=read_exit_notice())
        folder = read_scratch_folder()
        if folder is not None:
            scratch.use(folder)
        _job = Job(worker_env, _settings)
        atexit.register(_end)
        _report_exceptions(_job)
        save_once.install(_job.may_publish)
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
    """At exit: nothing may follow."""
    global _job, _fixed
    shutdown()
    save_once.install(None)
    for each in (_job, _fixed):
        if each is not None:
            each.close()
    _job = _fixed = None
    shorten_exit()


def is_initialized() -> bool:
    """Whether init() was called and shutdown() was not."""
    return world.is_entered()


def job() -> Job | None:
    """The connection to a coordinator; None when alone or under a fixed-size launcher."""
    return _job


def rank() -> int:
    """This worker's place among all workers, from 0. May change with the generation."""
    return world.current().placement.rank


def size() -> int:
    """How many workers there are now."""
    return world.current().placement.size


def local_rank() -> int:
    """This worker's place among the workers of its host. May change with the generation: see slot()."""
    return world.current().placement.local_rank


def local_size() -> int:
    """How many workers this host has."""
    return world.current().placement.local_size


def cross_rank() -> int:
    """The place of this worker's host among the hosts that have a worker of the same local rank."""
    return world.current().placement.cross_rank


def cross_size() -> int:
    """How many hosts have a worker of this local rank."""
    return world.current().placement.cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of workers."""
    return world.current().is_homogeneous


def slot() -> int:
    """This worker's slot on its host: it keeps the slot, and so its device, for life; a replacement of a dead
    worker gets the dead one's."""
    world.current()
    return _slot


def device() -> torch.device:
    """The device of this worker's slot: the CUDA device of that number where there is one, else the CPU."""
    if torch.cuda.is_available() and slot() < torch.cuda.device_count():
        return torch.device("cuda", slot())
    return torch.device("cpu")


def generation() -> int:
    """The number of the current generation, from 1; it grows with each change of the membership."""
    return world.current().id.number


def _enter_alone() -> None:
    nobody = GenerationId(run_id=1, coordinator_epoch=1, number=0, nonce="alone")
    placement = Placement(0, 1, 0, 1, 0, 1)
    named = NamedCollectives(AloneTransport(), placement=placement, connect=_no_connection, settings=_settings())
    world.enter(world.World(nobody, placement, AloneTransport(), named))


def _no_connection(ranks: tuple[int, ...], process_set: int) -> Transport:
    raise AssertionError(f"a world of one connects to nobody, asked for {ranks} of process set {process_set}")


def _settings() -> NamedSettings:
    """What the environment says now: scripts set variables before each init()."""
    said = read_horovod_settings()
    return NamedSettings(
        cache_capacity=said.cache_capacity,
        fusion_bytes=said.fusion_bytes,
        stall_warning_s=said.stall_warning_s if said.stall_check else 0.0,
        stall_abort_s=said.stall_shutdown_s or 0.0,
        dynamic_process_sets=said.dynamic_process_sets or _is_dynamic,
    )


def _start_timeline() -> None:
    """The one that HOROVOD_TIMELINE asks for. Not by a newcomer: it is a rank 0, too, until it is admitted."""
    said = read_horovod_settings()
    if said.timeline is not None and not (_job is not None and _job.is_newcomer()):
        start_timeline(said.timeline, said.mark_cycles)


def _check_comm(comm: Sequence[int] | None) -> None:
    everybody = list(range(size()))
    if comm is not None and list(comm) != everybody:
        raise ValueError(
            f"init(comm={list(comm)}): this job has ranks {everybody}; for a part of them use "
            f"init(process_sets=[ProcessSet({list(comm)})])"
        )


def _report_exceptions(job: Job) -> None:
    """Tell the coordinator of an exception that ends this worker, so that it knows more than an exit code."""
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, JobEnded):
            return  # Whoever ended the job says why; a traceback from each worker would only hide it.
        summary = _in_one_line(traceback.format_exception_only(kind, error)[-1].strip())
        text = "".join(traceback.format_exception(kind, error, trace))
        job.link.send(Failed(summary[:1_000], text[-_TRACEBACK_LIMIT:]))
        show(kind, error, trace)

    sys.excepthook = hook


def _in_one_line(summary: str) -> str:
    """The first line; of what torch tells of a loader worker's exception the last one, which is the exception."""
    lines = [line.strip() for line in summary.splitlines() if line.strip()]
    if not lines:
        return summary
    return lines[-1] if any(line.startswith("Original Traceback") for line in lines) else lines[0]


register(init)
