"""The process's place in a job: init(), shutdown(), and what rank(), size() and their kin answer."""

from __future__ import annotations

import atexit
import sys
import traceback
from types import TracebackType

import torch

from farandole.collectives import world
from farandole.collectives.alone import AloneTransport
from farandole.collectives.listener import DataListener
from farandole.collectives.ring_builder import RingBuilder
from farandole.env import FixedEnv, read_fixed_env, read_scratch_folder, read_worker_env
from farandole.errors import JobEnded
from farandole.membership import GenerationId, Placement
from farandole.messages import Failed
from farandole.worker import scratch
from farandole.worker.fixed_size import Meeting
from farandole.worker.job import Job

# Under a fixed-size launcher, for all ranks to have imported torch and called init(); as --start-timeout.
_CONNECT_TIMEOUT_S = 120.0
_TRACEBACK_LIMIT = 100_000  # characters; its end says most

_job: Job | None = None
_slot = 0
_listener: DataListener | None = None  # under a fixed-size launcher; a Job has its own


def init() -> None:
    """Join the job that this process was started for. Idempotent.

    Under `farandole run`: waits until all workers of the start have called it; a worker that was started into
    a running job is a world of one until its elastic function is admitted. Under torchrun, mpirun or srun: a
    job of fixed size. Started by hand: a world of one.

    Raises ConfigError for an environment that makes no sense, JobEnded when the job is over already.
    """
    global _job, _slot
    if world.is_entered():
        return
    worker_env, fixed_env = read_worker_env(), read_fixed_env()
    if worker_env is not None:
        _slot = worker_env.slot
        folder = read_scratch_folder()
        if folder is not None:
            scratch.use(folder)
        _job = Job(worker_env)
        _report_exceptions(_job)
        if not _job.meet():
            _enter_alone()
    elif fixed_env is not None and fixed_env.size > 1:
        _slot = fixed_env.local_rank
        _meet_fixed(fixed_env)
    else:
        _enter_alone()
    atexit.register(shutdown)


def shutdown() -> None:
    """Leave the world: close all connections. Idempotent; called at exit. init() may follow."""
    global _job, _listener
    if world.is_entered():
        world.current().transport.close()
        world.enter(None)
    if _job is not None:
        _job.close()
        _job = None
    if _listener is not None:
        _listener.close()
        _listener = None


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
    nobody = GenerationId(lineage=1, incarnation=1, number=0, nonce="alone")
    world.enter(world.World(nobody, Placement(0, 1, 0, 1, 0, 1), AloneTransport()))


def _meet_fixed(env: FixedEnv) -> None:
    global _listener
    listener = DataListener()
    try:
        start = Meeting(env, _CONNECT_TIMEOUT_S).meet(listener.address)
        transport = RingBuilder(listener, start, f"rank{env.rank}", _CONNECT_TIMEOUT_S).build()
    except BaseException:
        listener.close()
        raise
    _listener = listener
    world.enter(world.World(start.id, start.placement, transport))


def _report_exceptions(job: Job) -> None:
    """Tell the coordinator of an exception that ends this worker, so that it knows more than an exit code."""
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, JobEnded):
            return  # Whoever ended the job says why; a traceback from each worker would only hide it.
        summary = traceback.format_exception_only(kind, error)[-1].strip()
        text = "".join(traceback.format_exception(kind, error, trace))
        job.link.send(Failed(summary[-1_000:], text[-_TRACEBACK_LIMIT:]))
        show(kind, error, trace)

    sys.excepthook = hook
