"""The recovery of a survivor, between the end of one generation and the first step of the next.

Read from top to bottom: `regroup` is the path of docs/when-a-worker-dies.md on the worker's side.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec
import torch

from farandole.base.liveness.status_reporting import InPhase
from farandole.base.machine import now_s
from farandole.base.membership import Phase
from farandole.base.wire.link_messages import FirstStep, Start, Synced
from farandole.errors import GenerationEnded, RecoverableError, StepError
from farandole.training.collectives import agreement
from farandole.training.collectives.transport import Transport
from farandole.training.state import step
from farandole.training.state.sync import SyncReport

if TYPE_CHECKING:
    from farandole.training.worker.worker_job import WorkerJob

logger = logging.getLogger("farandole")


Agree = Callable[[Transport, bool], SyncReport | None]
"""agree(transport, bootstrap): makes the state the same on all members; None where the state does not report how."""


@dataclass(frozen=True)
class Connection:
    """A connection to the members of a new generation; their states are not compared yet. Times in seconds."""

    start: Start
    transport: Transport
    ready_s: float  # from the ABORT to READY; 0 for a planned change
    waited_s: float  # from READY to START: the others, and the coordinator
    built_s: float  # data connections


@dataclass(frozen=True)
class Regrouped:
    """The course of one regroup on this worker."""

    connection: Connection
    report: SyncReport | None
    synced_s: float  # progress compared, state copied

    def log(self, position: str) -> None:
        logger.info(
            "generation %d with %d workers, %s: waited %.1f ms, connected %.1f ms, synced %.1f ms",
            self.connection.start.id.number,
            self.connection.start.placement.size,
            position,
            self.connection.waited_s * 1e3,
            self.connection.built_s * 1e3,
            self.synced_s * 1e3,
        )


def connect(job: WorkerJob) -> Connection:
    """Leave the generation that has ended, and connect to the members of the next one: READY, START, new transport.

    Called by the main thread, which is in no collective therefore; the operations of other threads are ended first. A
    further fault leads to one more generation. Raises JobEnded when the job is over, SystemExit when this worker has
    left it.
    """
    while True:
        job.quiesce()
        start = job.wait_for_start()
        started = now_s()
        try:
            transport = job.build(start)
        except RecoverableError:
            job.link.wait_for_abort(above=start.id.number)
            continue
        ready_s = max(0.0, job.ready_s - job.link.aborted_s) if job.link.ordered >= start.id.number else 0.0
        return Connection(start, transport, ready_s, started - job.ready_s, now_s() - started)


def regroup(job: WorkerJob, agree: Agree, connection: Connection | None = None) -> Regrouped:
    """Move to the next generation: connect, and make the state the same on all members.

    The state that `agree` copies must be that of the last boundary. Returns once this worker is a member whose state
    equals that of all others. Any further fault leads to one more generation. Raises what connect() raises.

    connection  the connection that was made already, in the middle of a loop body
    """
    with InPhase(Phase.REGROUPING):
        while True:
            connection = connection or connect(job)
            start, agreeing_s = connection.start, now_s()
            try:
                report = agree(connection.transport, start.bootstrap)
            except RecoverableError:
                job.link.wait_for_abort(above=start.id.number)
                connection = None
                continue
            job.link.send(Synced(start.id.number))
            job.settle()
            return Regrouped(connection, report, synced_s=now_s() - agreeing_s)


def report_first_step(
    job: WorkerJob,
    done: Regrouped,
    began_at: int,
    counts: Literal["step", "commit"],
    steps_redone: int = 0,
    samples_redone: int = 0,
) -> None:
    """Report the cost of this regroup when the first step after it is decided here. Arguments as in FirstStep."""
    connection, synced_s = done.connection, now_s()

    def decided() -> None:
        job.link.send(
            FirstStep(
                connection.start.id.number,
                ready_s=connection.ready_s,
                waited_s=connection.waited_s,
                connected_s=connection.built_s,
                synced_s=done.synced_s,
                stepped_s=now_s() - synced_s,
                steps_redone=steps_redone,
                samples_redone=samples_redone,
                counts=counts,
                began_at=began_at,
            )
        )

    step.when_next_decided(decided)


# The registry of what an abort reaches: the only way from the worker's link to a blocked collective -------------------
#
# While a worker connects, or runs a collective, its main thread can be blocked for as long as a peer does not answer.
# The coordinator then ends the generation, and the link's thread ends the call:
#
#     who registers    world_builder.py, each object of a generation before it can block: builders of rings, rings, the
#                      transports built upon them, and the point-to-point connections. On the main thread; for a process
#                      set on the thread that runs the round.
#     who aborts       link.py, on the link's thread: at an ABORT all objects of older generations, and at a STOP, when
#                      the job is over, all objects.
#     who closes       worker_job.py, on the main thread: the objects of all other generations when a new one is in sync
#                      (`settle`), and every object at shutdown() (`leave`).
#     who else reads   worker_job.py, on the link's thread: the neighbours of the newest generation, for link probes.
#
# After an abort a registration stays, so that the object is closed with its generation. The object's calls raise
# GenerationEnded, now and later. Whatever is registered for an aborted generation afterwards is aborted at once, and
# register() raises GenerationEnded. An abort for a generation that was aborted before changes nothing: objects keep
# the first reason.
#
# Two things end collectives without this registry, both on the main thread. The run loops abort transports of the
# current world that other workers may wait in (`Job.quiesce`, `CommitLoop`). And `collectives/world.py` refuses or
# interrupts collectives before they begin.


class Abortable(Protocol):
    """A builder or a transport."""

    def abort(self, reason: str) -> None:
        """End running and later calls with GenerationEnded, at once. From any thread, also after close()."""
        ...

    def close(self) -> None:
        """Release the connections. Idempotent."""
        ...


class AbortRegistry:
    """The objects of each generation, by its number. All methods may be called from any thread.

    The lock is held only while the lists are read or changed, never while an object is built, aborted or closed: an
    abort waits for no other thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._references: dict[int, list[Callable[[], Abortable | None]]] = {}
        self._entered = 0
        self._aborted_below = 0
        self._reason = ""

    def register(
        self, number: int, abortable: Abortable, *, is_builder: bool = False, replaces: Abortable | None = None
    ) -> None:
        """Let aborts reach an object of generation `number` from now on. Raises GenerationEnded if that was aborted
        before; so is the object now.

        is_builder  it still connects to its neighbours. If it fails, it stays registered: the coordinator may ask which
                    of them answer
        replaces    the builder of this object, which is forgotten
        """
        with self._lock:
            others = [each for each in self._references.get(number, ()) if each() not in (None, replaces)]
            is_weak = number == self._entered and not is_builder
            self._references[number] = [*others, weakref.ref(abortable) if is_weak else lambda: abortable]
            is_aborted, reason = number < self._aborted_below, self._reason
        if is_aborted:
            abortable.abort(reason)
            raise GenerationEnded("regroup", number, reason)

    def enter(self, number: int) -> None:
        """Hold the objects of a generation weakly from now on, since its world is complete and holds them: process sets
        are added and removed in it. Objects of a world that was never completed are held until they are closed."""
        with self._lock:
            self._entered = number
            self._references[number] = [weakref.ref(each) for each in self._living(number)]

    def abort_below(self, number: int, reason: str) -> None:
        """Abort all objects of generations before `number`, those that are registered from now on, too."""
        with self._lock:
            if number > self._aborted_below:
                self._aborted_below, self._reason = number, reason
            ended = [each for other in self._references if other < number for each in self._living(other)]
        for each in ended:
            each.abort(reason)

    def abort_all(self, reason: str) -> None:
        """Abort all objects, since the job is over."""
        self.abort_below(sys.maxsize, reason)

    def close_all_but(self, number: int) -> None:
        """Close and forget the objects of other generations, also of worlds that were never completed."""
        with self._lock:
            ended = [each for other in self._references if other != number for each in self._living(other)]
            self._references = {other: kept for other, kept in self._references.items() if other == number}
        for each in ended:
            each.close()

    def close_all(self) -> None:
        """Close and forget all objects. The next world, of the same generation or of another one, begins anew."""
        with self._lock:
            ended = [each for number in self._references for each in self._living(number)]
            self._references, self._entered = {}, 0
        for each in ended:
            each.close()

    def newest(self) -> tuple[int, list[Abortable]]:
        """Return the number of the newest generation, and its objects; 0 and none before the first one."""
        with self._lock:
            number = max(self._references, default=0)
            return number, self._living(number)

    def _living(self, number: int) -> list[Abortable]:
        """Return the objects that still exist. Call it with the lock held."""
        return [each for reference in self._references.get(number, ()) if (each := reference()) is not None]


# Calls of fd.mean and fd.any in a loop body, which survive the loss of a worker ---------------------------------------
#
# Such a call must not leave the loop body: after a decided step the rest of the body (a scheduler's step, an average
# of weights) could not be repeated. So this worker connects to the members of the next generation inside the body,
# and the call is completed in *rounds* among the workers that are in the same call. A worker that has reached its
# next boundary takes part in the rounds, too, until all have; only then are the states compared. A worker that had
# completed the call before the loss sends its result to the others.


class CallKey(msgspec.Struct, frozen=True):
    """The key of one call, the same on all workers that make it: its kind, and its number since a boundary."""

    boundary_number: int
    kind: bytes
    count: int


class CallRound(msgspec.Struct, frozen=True):
    """The message of one worker in a round.

    waits_in  the call that it is in; None: it has reached its next boundary
    value     its contribution: the bytes of its tensor; at a boundary, what the others need there
    last      the call that it has completed last, and its result
    """

    waits_in: CallKey | None
    value: bytes
    last: CallKey | None
    result: bytes


class BodyCalls:
    """The calls of one worker.

    boundary_number  gives the number of the boundary that was passed last
    is_in_body       whether a batch is out, so that a call can be completed where it is
    is_connected     whether this worker is connected to a new generation whose states are not compared yet
    connect          connects to the members of the next generation
    transport        gives the transport of the current generation
    add_up           adds up over all workers of a generation, where no worker was lost
    """

    def __init__(
        self,
        boundary_number: Callable[[], int],
        is_in_body: Callable[[], bool],
        is_connected: Callable[[], bool],
        connect: Callable[[], None],
        transport: Callable[[], Transport],
        add_up: Callable[[str, torch.Tensor], torch.Tensor] = agreement.add_up,
    ) -> None:
        self._boundary_number, self._is_in_body, self._is_connected = boundary_number, is_in_body, is_connected
        self._connect, self._transport, self._add_up = connect, transport, add_up
        self._counts: Counter[bytes] = Counter()
        self._counted_at = -1
        self._last: CallKey | None = None
        self._result = b""

    def call(self, what: str, mine: torch.Tensor) -> torch.Tensor:
        """Return the sum of `mine` over all workers; over the remaining ones when a worker is lost in a loop body."""

        total: torch.Tensor | None = None

        def first_try() -> bytes:
            nonlocal total
            total = self._add_up(what, mine)
            return _to_bytes(total)

        def combine(parts: list[bytes]) -> bytes:
            return _to_bytes(torch.stack([_like(mine, each) for each in parts]).sum(0).to(mine.dtype))

        result = self.complete(what, first_try, lambda: _to_bytes(mine), combine)
        return _like(mine, result) if total is None else total

    def complete(
        self,
        what: str,
        first_try: Callable[[], bytes],
        mine: Callable[[], bytes],
        combine: Callable[[list[bytes]], bytes],
    ) -> bytes:
        """Carry out a collective that the remaining workers complete when a worker is lost in a loop body. Return its
        result. Raises RecoverableError if calls are not completed here, and StepError in a run of the loop body that is
        not the last one where workers may run it another number of times.

        what       the kind of the call: calls of different kinds are counted apart
        first_try  carries it out among all workers, and returns the result
        mine       returns the contribution of this worker
        combine    returns the result from the contributions of the workers in this call, in the order of their ranks
        """
        batch = step.batch()
        if batch is not None and batch.global_batch.has_own_bodies and not batch.is_last:
            raise StepError(
                f"{what.partition(' ')[0]}() in a run of the loop body that is not the last one for its global batch: "
                f"with balance, workers run the loop body as often as their local batches need. Call it where "
                f"optimizer.step() has returned True"
            )
        key = self._key(what)
        result = self._first_try(first_try)
        while result is None:
            try:
                result = self._complete(self._transport(), key, mine(), combine)
            except RecoverableError:
                self._connect()
        self._last, self._result = key, result
        return result

    def gather_at_boundaries(self, transport: Transport, payload: bytes) -> list[bytes]:
        """Take part in the rounds, at a boundary, until every worker has reached its own. Return the payload of each,
        which travels in the last round: every exchange has to wake every worker."""
        mine = msgspec.msgpack.encode(CallRound(None, payload, self._last, self._result))
        while True:
            rounds = _all_gather(transport, mine)
            if all(each.waits_in is None for each in rounds):
                return [each.value for each in rounds]

    def _first_try(self, first_try: Callable[[], bytes]) -> bytes | None:
        """Return the result among all workers; None where the call has to be completed in rounds."""
        if self._is_connected():
            return None
        try:
            return first_try()
        except RecoverableError:
            if not self._is_in_body():
                raise
        self._connect()
        return None

    def _complete(
        self, transport: Transport, key: CallKey, mine: bytes, combine: Callable[[list[bytes]], bytes]
    ) -> bytes | None:
        """Return the result of one round; None: other workers needed a result first, another round follows."""
        rounds = _all_gather(transport, msgspec.msgpack.encode(CallRound(key, mine, self._last, self._result)))
        results = {each.last: each.result for each in rounds if each.last is not None}
        if key in results:
            return results[key]
        if any(each.waits_in in results for each in rounds):
            return None
        return combine([each.value for each in rounds if each.waits_in == key])

    def _key(self, what: str) -> CallKey:
        number, kind = self._boundary_number(), hashlib.blake2b(what.encode(), digest_size=8).digest()
        if number != self._counted_at:
            self._counts.clear()
            self._counted_at = number
        self._counts[kind] += 1
        return CallKey(number, kind, self._counts[kind])


def _all_gather(transport: Transport, mine: bytes) -> list[CallRound]:
    return [msgspec.msgpack.decode(each, type=CallRound) for each in transport.all_gather(mine)]


def _to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _like(tensor: torch.Tensor, raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=tensor.dtype).reshape(tensor.shape)
