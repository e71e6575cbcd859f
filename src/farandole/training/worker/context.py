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

from farandole.base.env import WorkerEnv, read_exit_notice, read_fixed_env, read_horovod_settings, read_worker_env
from farandole.base.liveness import status_reporting
from farandole.base.machine import now_s
from farandole.base.membership import GenerationId, Placement, Progress
from farandole.base.wire.encryption import load_certificates
from farandole.base.wire.messages import Connected, Failed, LinkBroken, MayPublish, Ready, Remark, Start
from farandole.errors import JobEnded, PeerLost, RecoverableError
from farandole.registry import factory
from farandole.training.collectives import world
from farandole.training.collectives.alone import AloneTransport
from farandole.training.collectives.data_listener import DataListener
from farandole.training.collectives.extension import SomeRanks, extenders
from farandole.training.collectives.ring import RingTransport
from farandole.training.collectives.ring_builder import RingBuilder
from farandole.training.collectives.transport import Transport
from farandole.training.collectives.world import World
from farandole.training.state import save_once
from farandole.training.worker import process_setup
from farandole.training.worker.fixed_job import FixedJob
from farandole.training.worker.link import Connections, Link, LinkProbe
from farandole.training.worker.process_setup import end_loader_processes_at_exit, keep_freed_memory, shorten_exit
from farandole.training.worker.worker_recovery import AbortRegistry
from farandole.training.worker.world_builder import WorldBuilder

logger = logging.getLogger("farandole")

# Seconds, under a fixed-size launcher, for all ranks to import torch and call init(); as --start-timeout.
_CONNECT_TIMEOUT_S = 120.0
_TRACEBACK_LIMIT = 100_000  # characters; the end holds the most information

_job: WorkerJob | None = None
_fixed: FixedJob | None = None
_slot = 0
_left: Placement | None = None  # the last placement before shutdown()


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
    keep_freed_memory()
    if level := read_horovod_settings().log_level:
        process_setup.set_log_level(level)
    end_loader_processes_at_exit()
    _join()
    factory("meeting")()
    try:
        _check_comm(comm)
        for each in extenders().values():
            each.entered(is_newcomer=_job is not None and _job.is_newcomer())
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
    global _left
    if not world.is_entered():
        return
    _left = world.current().placement
    if world.is_forked_child():
        world.enter(None)
        return
    if _job is not None:
        _job.leave()
    elif _fixed is not None:
        _fixed.leave()
    else:
        here = world.current()
        world.enter(None)
        here.close()
    for each in extenders().values():
        each.left()


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
    worker_env = read_worker_env()
    fixed_env = read_fixed_env() if worker_env is None else None  # torchrun's variables of a worker are for its script
    if worker_env is not None:
        _slot = worker_env.slot
        if worker_env.status_page:
            status_reporting.open_status_page(worker_env.status_page, gives_exit_notice=read_exit_notice())
        if worker_env.scratch_folder:
            process_setup.use_scratch_folder(worker_env.scratch_folder)
        _job = WorkerJob(worker_env)
        atexit.register(_end)
        _report_exceptions(_job)
        process_setup.name_what_holds_the_exit(lambda: _job is not None and not _job.has_finished)
        save_once.install_saver(_job.may_publish)
        if not _job.meet():
            _enter_alone()
    elif fixed_env is not None and fixed_env.size > 1:
        _slot = fixed_env.local_rank
        _fixed = FixedJob(fixed_env, _CONNECT_TIMEOUT_S)
        atexit.register(_end)
        _fixed.meet()
    else:
        _enter_alone()


def _end() -> None:
    """Leave the job at exit: no call may follow. A forked child has no job to leave."""
    global _job, _fixed
    if world.is_forked_child():
        return
    shutdown()
    save_once.install_saver(None)
    for each in (_job, _fixed):
        if each is not None:
            each.close()
    _job = _fixed = None
    shorten_exit()


def last_placement() -> Placement | None:
    """Return the current placement, or the last one before shutdown(); None before init()."""
    return world.current().placement if world.is_entered() else _left


def is_initialized() -> bool:
    """Return whether init() was called and shutdown() was not.

    See the example of `init`.
    """
    return world.is_entered()


def job() -> WorkerJob | None:
    """Return the connection to a coordinator; None when alone or under a fixed-size launcher."""
    return _job


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
    return _slot


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


def _enter_alone() -> None:
    nobody = GenerationId(run_id=1, coordinator_epoch=1, number=0, nonce="alone")
    placement = Placement(0, 1, _slot, _slot + 1, 0, 1)  # the device of a newcomer is not that of a live worker
    extensions = {name: each.extend(AloneTransport(), placement, _no_connection) for name, each in extenders().items()}
    world.enter(World(nobody, placement, AloneTransport(), extensions))


def _no_connection(ranks: tuple[int, ...], number: int) -> Transport:
    raise AssertionError(f"a world of one has no connections, requested number {number}, of ranks {ranks}")


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


# The worker's part of a job -------------------------------------------------------------------------------------------
#
# A worker in a job with a coordinator: its link, and the transports of its generations.
#
# Two threads use it. The main thread builds transports and runs collectives; the link's thread aborts them, by way of
# the AbortRegistry (worker_recovery.py).


# Seconds from START, when all members are quiescent, until the data connections exist. The agent of a peer that died
# meanwhile reports it much sooner; this limit covers unreported losses.
CONNECT_TIMEOUT_S = 5.0

_ANSWER_S = 30.0  # for the coordinator to answer whether a checkpoint counts; it is busy for milliseconds at most

# Seconds for all members to call init() again after a shutdown(): scripts may do much in between.
MEET_TIMEOUT_S = 120.0


class WorkerJob:
    """The worker's membership from init() to shutdown() under `farandole run`."""

    def __init__(self, env: WorkerEnv) -> None:
        self._worker = env.worker
        self._listener = DataListener(*env.data_hosts, tls=load_certificates(env.tls))
        self._aborts = AbortRegistry()
        self._retired: list[World] = []
        self._agreed = 0
        self._start: Start | None = None  # of the generation that this worker is in, or was before shutdown()
        self._session = 0
        self.ready_s = 0.0  # when READY was last sent
        self.has_finished = False  # an elastic function has returned on all workers
        self.link = Link(env, self._aborts)
        self._builder = WorldBuilder(
            self._listener,
            env.worker,
            env.agent_address,  # random, and one on each host
            extenders(),
            on_broken=self._report_broken,
            check=self.link.raise_if_over,
            aborts=self._aborts,
            on_way=lambda number, way: self.link.send(Connected(number, way)),
            slot=env.slot,
            on_remark=lambda topic, text: self.link.send(Remark(topic, text)),
        )
        self._link_probe = LinkProbe(env.detection_budget_s, self._connections, self.link.send, self._listener.address)
        self.link.on_look, self.link.look_every_s = self._look, self._link_probe.look_every_s
        self.link.on_probe = self._link_probe.probe
        self.link.open(env, self._listener.address)

    def meet(self) -> bool:
        """Wait for the first generation and enter it; False for a newcomer, which is admitted later."""
        start = self.link.wait_for_admission()
        if start is None:
            return False
        self.build(start)
        return True

    def meet_again(self) -> bool:
        """Enter the same generation anew after leave(), with all its members, or the one that replaces it. False for a
        worker that is not a member yet. Raises PeerLost when a member does not arrive in time."""
        if self._start is None:
            return False
        while not self.has_orders():
            self._session += 1
            try:
                self._enter(self._start, MEET_TIMEOUT_S)
            except RecoverableError as error:
                if isinstance(error, PeerLost) and error.op == "connect" and not self.has_orders():
                    raise  # the peer lives, and does not arrive
                self.link.wait_for_abort(above=self._start.id.number)
            else:
                return True
        while True:
            start = self.wait_for_start()
            try:
                self.build(start)
            except RecoverableError:
                self.link.wait_for_abort(above=start.id.number)
            else:
                return True

    def leave(self) -> None:
        """Close the connections to the other workers, for shutdown(). The coordinator still knows this worker; it may
        meet again."""
        self._builder.forget_settings()
        if world.is_entered():
            here = world.current()
            here.close_extensions()
            self._retired.append(here)
            world.enter(None)
        self._close_retired()
        self._aborts.close_all()

    def build(self, start: Start) -> Transport:
        """Open the data connections of a generation and enter its world.

        Raises PeerLost or GenerationEnded; the next order from the coordinator then determines the next action.
        """
        self._session = 0
        self._enter(start, CONNECT_TIMEOUT_S)
        return world.current().transport

    def may_publish(self, name: str, progress: Progress, file: str = "") -> str:
        """Ask whether a checkpoint, or a file of the script's own, counts. Return "", or the reason for a refusal. From
        any thread."""
        return self.link.may_publish(MayPublish(name, progress, file), _ANSWER_S)

    def quiesce(self) -> None:
        """End the background operations of the old generation: no collective touches a tensor afterwards."""
        if world.is_entered():
            world.current().end_extensions("this worker is regrouping")

    def settle(self) -> None:
        """Release the resources of old generations once the new one works. Not earlier: a peer may still read."""
        self._close_retired()
        self._aborts.close_all_but(world.current().id.number)
        for each in extenders().values():
            each.settled()

    def close(self) -> None:
        self.leave()
        self.link.close()
        self._listener.close()

    def _enter(self, start: Start, timeout_s: float) -> None:
        built = self._builder.build(start, self._session, timeout_s)
        was_newcomer = self.is_newcomer()
        if world.is_entered():
            self._retire(world.current())
        world.enter(built.world)
        self._aborts.enter(start.id.number)
        self._start, self._agreed = start, 0
        if built.carries_over:
            for each in extenders().values():
                each.carry_over(was_newcomer)

    def _retire(self, old: World) -> None:
        old.end_extensions("its generation is over")
        self._retired.append(old)

    def _close_retired(self) -> None:
        for old in self._retired:
            old.close()
        self._retired.clear()

    def _report_broken(self, number: int, peer: str, direction: str, detail: str) -> None:
        self.link.send(LinkBroken(number, peer, direction, detail))
        self._link_probe.probe(number)

    # Orders ----------------------------------------------------------------------------------------------

    def is_newcomer(self) -> bool:
        """Return whether this worker has not been a member yet."""
        return self.link.is_newcomer and self._start is None

    def has_to_regroup(self) -> bool:
        """Return whether an ABORT is pending, or every rank has agreed on a planned change."""
        return self.link.ordered > world.current().id.number or bool(self._agreed)

    def has_orders(self) -> bool:
        """Return whether the coordinator wants another generation than the last one of this worker."""
        number = self._start.id.number if self._start is not None else 0
        return max(self.link.ordered, self.link.prepared) > number

    def wait_for_start(self) -> Start:
        """Send READY for the newest order, and again whenever a further change replaces it, until START."""
        number = self.demanded_number()
        while True:
            if number:
                self.link.send(Ready(number))
            self.ready_s = now_s()
            answer = self.link.wait_for_start(above=number)
            if isinstance(answer, Start):
                return answer
            number = answer

    def ask_for_regroup(self, reason: str) -> None:
        """Report that the main thread left this generation without a fault that others could see. To the coordinator it
        is a failed connection: if it has no other explanation, it aborts the generation, with unchanged members."""
        assert self._start is not None
        self._report_broken(self._start.id.number, self._start.next.worker, "left", reason)

    def demanded_number(self) -> int:
        """Return the generation to be READY for; 0 for a newcomer, which is ready for any.

        After a collective that failed before any order came, wait for the order: the failure is only a hint, and the
        coordinator decides.
        """
        here = self._start.id.number if self._start is not None else 0
        if self.link.ordered > here:
            return self.link.ordered
        if self._agreed:
            return self._agreed
        if self.is_newcomer():
            return 0
        if not world.is_entered() and self.link.prepared > here:
            return self.link.prepared  # between shutdown() and init() there is no agreement
        return self.link.wait_for_abort(above=here)

    def agree(self, prepared_by_rank: list[int]) -> None:
        """Agree on a planned change when all ranks hold a PREPARE for the same generation."""
        first = prepared_by_rank[0]
        is_agreed = first > world.current().id.number and all(each == first for each in prepared_by_rank)
        self._agreed = first if is_agreed else 0

    # The link's thread -----------------------------------------------------------------------------------

    def _look(self) -> None:
        self._link_probe.look()
        self._listener.tidy()

    def _connections(self) -> Connections | None:
        """Return the connections of the newest generation, unless an ABORT has ended it."""
        number, abortables = self._aborts.newest()
        rings = [each for each in abortables if isinstance(each, RingTransport | RingBuilder)]
        if not rings or self.link.ordered > number:
            return None
        still = [since_s for ring in rings if (since_s := ring.still_since_s) is not None]
        peers = frozenset(peer for ring in rings for peer in ring.peers if peer.worker != self._worker)
        return Connections(number, peers, min(still, default=None))
