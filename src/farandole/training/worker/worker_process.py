"""The part of this process in a job: how it enters the world that its environment describes, leaves it, and ends."""

from __future__ import annotations

import atexit
import sys
import traceback
from types import TracebackType

from farandole.base.env import read_exit_notice, read_fixed_env, read_worker_env
from farandole.base.liveness import status_reporting
from farandole.base.membership import GenerationId, Placement
from farandole.base.wire.link_messages import Failed
from farandole.errors import JobEnded
from farandole.training.collectives import world
from farandole.training.collectives.alone import AloneTransport
from farandole.training.collectives.extension import extenders
from farandole.training.collectives.transport import Transport
from farandole.training.collectives.world import World
from farandole.training.state.session import SESSION
from farandole.training.worker import process_setup
from farandole.training.worker.fixed_job import FixedJob
from farandole.training.worker.worker_job import WorkerJob

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
        if self.job is not None:
            if not self.job.meet_again():
                self._enter_alone()
            return
        if self._fixed is not None:
            self._fixed.meet()
            return
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
            if not self.job.meet():
                self._enter_alone()
        elif fixed_env is not None and fixed_env.size > 1:
            self.slot = fixed_env.local_rank
            self._fixed = FixedJob(fixed_env, CONNECT_TIMEOUT_S)
            atexit.register(self._end)
            self._fixed.meet()
        else:
            self._enter_alone()

    def leave(self) -> None:
        """Leave the current world, for shutdown(). A forked child only forgets it."""
        here = world.current()
        self.left = here.placement
        if world.is_forked_child():
            world.enter(None)
            return
        if self.job is not None:
            self.job.leave()
        elif self._fixed is not None:
            self._fixed.leave()
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
        for each in (self.job, self._fixed):
            if each is not None:
                each.close()
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
