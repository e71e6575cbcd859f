"""Match the named operations of all ranks of one generation, and execute them, in rounds.

Callers submit from any thread and in any order, and wait on handles. In a round all ranks exchange their request lists
(exchange()), make the same decision (negotiation.py), and execute it in the same order (execution.py). One thread at a
time runs the rounds of a rank: a caller that waits for its operation, so that no other thread has to be woken for it;
or, for operations that nobody waits for, a thread that sleeps until there is one, here or on another rank. A world of
one has no such thread.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import msgspec

from farandole.base.env import HorovodSettings
from farandole.base.liveness.status_reporting import WaitingForPeers
from farandole.base.machine import now_s
from farandole.base.membership import Placement
from farandole.errors import CollectiveMismatch
from farandole.integrations.horovod.named.execution import FusionBuffers, execute
from farandole.integrations.horovod.named.negotiation import Negotiation
from farandole.integrations.horovod.named.pending import StallWatch
from farandole.integrations.horovod.named.stages import (
    END,
    GLOBAL_SET,
    AllJoined,
    Execute,
    Fail,
    Key,
    Kind,
    Request,
    RequestList,
    Response,
    SetAdded,
    SetRemoved,
)
from farandole.integrations.horovod.named.tensor_queue import Handle, Submission, TensorQueue
from farandole.integrations.horovod.named.timeline import Timeline, process_timeline
from farandole.training.collectives import world
from farandole.training.collectives.alone import AloneTransport
from farandole.training.collectives.connection_pair import Wake
from farandole.training.collectives.extension import Connect
from farandole.training.collectives.transport import NOTHING, Transport

logger = logging.getLogger("farandole")

NAMED = "named operations"
"""The name of this extension of a world."""

# The time for the other ranks to take part in a round that this one has begun. Only a rank that hangs takes longer.
_CLOSE_TIMEOUT_S = 5.0
_CHECK_EVERY_S = 1.0  # the interval of checks for stalls; a waiting thread wakes up as often

# After an operation of this rank the thread leaves the next round to the next caller for this time. A round that
# another rank has begun meanwhile can decide nothing without this one: operations of all ranks wait for its request.
_LEFT_TO_CALLERS_S = 1.0


class NamedCollectives:
    """All operations that are matched by name, from the start of a generation to its end.

    Args:
        transport: A transport of its own, on which no other code runs collectives. close() closes it.
        connect: Opens the connections of a process set, whose id is their number.
        timeline: Receives the events; None for that of start_timeline().
    """

    def __init__(
        self,
        transport: Transport,
        *,
        placement: Placement,
        connect: Connect,
        settings: HorovodSettings | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.settings = settings = settings or HorovodSettings()
        self.rank = placement.rank
        self._connect = connect
        self.is_before_admission = False  # a newcomer, alone: the ranks of the job are not known yet
        self._negotiation = Negotiation(placement.size, settings.cache_capacity, settings.fusion_bytes)
        warning_s = 0.0 if settings.stall_check_is_off else settings.stall_warning_s
        self._stalls = StallWatch(warning_s, settings.stall_shutdown_s)
        self._next_check_s = 0.0
        self._expired: Sequence[Key] = ()
        self._timeline = timeline or process_timeline
        self._buffers = FusionBuffers()
        self._transports: dict[int, Transport] = {GLOBAL_SET: transport}
        self.process_sets: dict[int, tuple[int, ...]] = {GLOBAL_SET: tuple(range(placement.size))}
        """The global ranks of each process set, by its id; 0 is the set of all ranks. Read only."""
        self._numbers: defaultdict[tuple[Kind, int], Iterator[int]] = defaultdict(itertools.count)
        self._wake = Wake() if placement.size > 1 else None
        self._queue = TensorQueue(self._wake)
        self._is_closing = False
        self._turn = threading.Lock()
        """Held by the thread that runs rounds, and so uses the transports."""
        self._left_to_callers_until_s = 0.0
        self._thread: threading.Thread | None = None
        if self._wake is not None:
            self._thread = threading.Thread(
                target=self._run, args=(self._wake,), name="farandole-collectives", daemon=True
            )
            self._thread.start()

    def next_number(self, kind: Kind, process_set: int) -> int:
        """Return the number for an unnamed operation: the same on all members, as long as all submit the same."""
        return next(self._numbers[kind, process_set])

    def submit(self, submissions: Sequence[Submission], *, is_awaited: bool = False) -> None:
        """Submit operations; the other ranks learn of all of them in one round. Callable from any thread.

        Args:
            is_awaited: The caller waits for the operations at once, and runs their rounds then (run_until_done).

        Raises ValueError when one of the names is in flight in its process set, and the error that ended this
        generation if it has ended; then none is submitted. Raises StepError where collectives are refused (world.py).
        """
        if submissions:
            world.raise_if_refused(submissions[0].key.name)
        self._queue.add(submissions, wakes=not is_awaited)
        if self._wake is None:
            self._run_alone()

    def begin_end(self) -> Handle:
        """Submit that this rank's elastic function has returned. The handle ends when that of each rank has; with
        CollectiveMismatch, on all ranks, when another one waits for this one in an operation."""
        handle = Handle(run_until_done=self.run_until_done)
        self._queue.add([Submission(Request(END), handle=handle)])
        if self._wake is None:
            self._run_alone()
        return handle

    def run_until_done(self, handle: Handle) -> None:
        """Run rounds in the calling thread until the handle is done or this rank has left, unless another thread runs
        them. Callable from any thread."""
        if self._wake is None:
            return
        if self._turn.acquire(blocking=False):
            try:
                while not handle.is_done:
                    with WaitingForPeers():
                        is_due = self._wait_for_reason(self._wake)
                    if not is_due:
                        break
                    self._round()
            except Exception as error:  # noqa: BLE001 - every handle gets it
                self._end(error)
            except BaseException as interruption:
                self.abort(f"a named operation was interrupted by {type(interruption).__name__}")
                self._end_by_transport()
                raise
            finally:
                self._turn.release()
            is_left = not self._queue.is_empty  # operations of other callers
        else:
            is_left = self._queue.has_unsent
        if is_left:
            self._queue.wake()

    def raise_if_ended(self) -> None:
        """Raise the error that would end an operation now; for a world of one, where no other rank needs it."""
        self._queue.add(())
        self._transports[GLOBAL_SET].barrier()

    def raise_if_failed(self) -> None:
        """Raise the error that has ended this generation for this worker, if any has."""
        self._queue.add(())

    def abort(self, reason: str) -> None:
        """End running, waiting and later operations with GenerationEnded. Callable from any thread."""
        for transport in list(self._transports.values()):
            transport.abort(reason)
        if self._thread is not None and self._thread.is_alive():
            self._queue.wake()

    def wait_until_quiet(self) -> None:
        """Wait, after abort(), until all handles have ended and no tensor of the user is touched any more."""
        if self._thread is None:
            self._run_alone()
        else:
            self._thread.join()
            with self._turn:
                pass  # a caller in another thread has ended its round

    def close(self) -> None:
        """Take part in a round that has begun, then leave. Operations that still wait end with GenerationEnded.
        Idempotent; returns at once after abort()."""
        self._is_closing = True
        if self._thread is not None and self._thread.is_alive():
            self._queue.wake()
            self._thread.join(_CLOSE_TIMEOUT_S)
        self.abort("the named collectives were closed")
        self.wait_until_quiet()
        self._end_by_transport()
        for transport in self._transports.values():
            transport.close()
        if self._wake is not None:
            self._wake.close()

    # Rounds ----------------------------------------------------------------------------------------------

    def _run(self, wake: Wake) -> None:
        """Run the thread, from the first round to the last."""
        try:
            while True:
                self._leave_to_callers(wake)
                with self._turn:
                    if not self._wait_for_reason(wake):
                        return
                    self._round()
        except BaseException as error:  # noqa: BLE001 - every handle gets it
            self._end(error)

    def _leave_to_callers(self, wake: Wake) -> None:
        """Sleep while the next caller may run the next round."""
        while len(self.process_sets) == 1 and self._queue.is_empty and not (wake.is_set or self._is_closing):
            left_s = self._left_to_callers_until_s - now_s()
            if left_s <= 0 or wake.wait(left_s):
                return

    def _run_alone(self) -> None:
        with self._turn:
            try:
                self._round()
            except BaseException as error:  # noqa: BLE001 - as in _run
                self._end(error)

    def _wait_for_reason(self, wake: Wake) -> bool:
        """Wait until a round is due. Return False when this rank is to leave instead."""
        transport = self._transports[GLOBAL_SET]
        while not self._queue.has_unsent:
            self._queue.clear_wake()
            if self._is_closing:
                return False
            if self._check_stalls():
                return True
            was_called = transport.wait_for_peer(wake.descriptor)
            if was_called or (was_called is False and not wake.is_set and self._is_over_for_all()):
                return True
        return True

    def _is_over_for_all(self) -> bool:
        """Return whether this rank must find out why a neighbour has gone, without which no round can end. If no
        operation waits here, the neighbour may have finished normally. But the ranks beyond, which cannot see it, must
        not wait for it."""
        if self._queue.is_empty:
            self.abort("a neighbouring rank has left")
        return not self._queue.is_empty

    def _check_stalls(self) -> bool:
        """Warn, periodically, of operations that stall. Return whether one of them has expired."""
        if self._stalls.is_on and now_s() >= self._next_check_s:
            self._next_check_s = now_s() + _CHECK_EVERY_S
            report = self._stalls.check(now_s(), self._negotiation.waiting())
            self._expired = report.expired
            if self.rank == 0:  # the warnings are equal on all ranks
                for warning in report.warnings:
                    logger.warning(warning)
        return bool(self._expired)

    def _round(self) -> None:
        """Exchange requests with all ranks, and carry out the responses. Raises the errors of the transport."""
        has_requests = self._queue.has_unsent
        requests = [submission.request for submission in self._queue.take_unsent()]
        request_list = self._negotiation.request_list(self.rank, requests, self._expired)
        self._expired = ()
        request_lists = exchange(request_list, self._transports[GLOBAL_SET])
        if self._timeline.is_on:
            self._record(request_lists)
        for response in self._negotiation.round(request_lists):
            self._carry_out(response)
        if has_requests:
            self._left_to_callers_until_s = now_s() + _LEFT_TO_CALLERS_S

    def _record(self, request_lists: Sequence[RequestList]) -> None:
        """Record the requests of a round on the timeline."""
        self._timeline.cycle()
        for rank, key in self._negotiation.requested(request_lists):
            if key == END:
                continue
            self._timeline.negotiate_start(key.name, key.kind)
            self._timeline.rank_ready(key.name, rank)

    def _end(self, error: BaseException) -> None:
        """End this rank's part in all rounds; every other rank, whose next round needs it, ends too."""
        self.abort(f"rank {self.rank} has ended its named collectives: {error}")
        self._queue.end(error)

    def _end_by_transport(self) -> None:
        """End the waiting operations, after an abort, with the transport's error."""
        try:
            self._transports[GLOBAL_SET].barrier()
        except Exception as error:  # noqa: BLE001 - handed on
            self._queue.end(error)

    # Responses -------------------------------------------------------------------------------------------

    def _carry_out(self, response: Response) -> None:
        match response:
            case Execute():
                self._execute(response)
            case Fail():
                self._finish(response.key, CollectiveMismatch(response.message))
            case AllJoined():
                self._finish_join(response)
            case SetAdded():
                self._add_set(response)
            case SetRemoved():
                self._remove_set(response)

    def _execute(self, response: Execute) -> None:
        operations = response.operations
        if operations[0].key == END:
            self._finish(END, None)
            return
        if self._timeline.is_on:
            for operation in operations:
                self._timeline.end(operation.key.name)
        transport = self._transports.get(operations[0].key.process_set)
        if transport is None:
            return  # an operation of a process set without this rank
        submissions = [
            None if operation.requests[transport.rank] is None else self._queue.find(operation.key)
            for operation in operations
        ]
        is_recorded = self._timeline.is_on
        if is_recorded:
            for operation in operations:
                self._timeline.begin(operation.key.name, operation.key.kind.name)
        try:
            execute(operations, submissions, transport, self._buffers)
        finally:
            if is_recorded:
                for operation in operations:
                    self._timeline.end(operation.key.name)
        self._queue.forget(submissions)

    def _finish(self, key: Key, result: object) -> None:
        """End this rank's part, if it has one, with a result or with an error."""
        self._timeline.end(key.name)
        submission = self._queue.find(key)
        if submission is not None:
            if isinstance(result, BaseException):
                submission.fail(result)
            else:
                submission.finish(result)
            self._queue.forget([submission])

    def _finish_join(self, response: AllJoined) -> None:
        # Ranks that joined early submitted less: from here on the counts are equal again. The set has nothing in
        # flight.
        for key in list(self._numbers):
            if key[1] == response.process_set:
                del self._numbers[key]
        for submission in self._queue.in_flight():
            if submission.key.kind is Kind.JOIN and submission.key.process_set == response.process_set:
                submission.finish(response.last_rank)
                self._queue.forget([submission])

    def _add_set(self, response: SetAdded) -> None:
        """Open the connections of a new process set. Its members do so at the same point of the same round."""
        ranks = response.ranks
        self.process_sets[response.process_set] = ranks
        if self.rank in ranks:
            alone = len(ranks) == 1
            transport = AloneTransport() if alone else self._connect(ranks, response.process_set)
            self._transports[response.process_set] = transport
        self._finish(response.key, response.process_set)

    def _remove_set(self, response: SetRemoved) -> None:
        """Close the connections of a process set. Operations that waited in it have failed before."""
        self.process_sets.pop(response.process_set, None)
        transport = self._transports.pop(response.process_set, None)
        if transport is not None:
            transport.close()
        self._finish(response.key, True)


def engine() -> NamedCollectives:
    """Return the named collectives of the current world. Raises NotInitialized before init()."""
    named = world.current().extensions.get(NAMED)
    if not isinstance(named, NamedCollectives):
        raise RuntimeError("this world has no named collectives")
    return named


# The exchange of a round: the request list of every rank goes to every rank -------------------------------------------
#
# Lists travel in a trailer of fixed length, which takes one trip around the ring and no agreement on lengths before. A
# second exchange follows only when some rank's list does not fit.

TRAILER_BYTES = 64

_TOO_LONG = 0xFF
_NO_REQUESTS = RequestList()

_encode: Callable[[RequestList], bytes] = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes], RequestList] = msgspec.msgpack.Decoder(RequestList).decode


def exchange(request_list: RequestList, transport: Transport) -> list[RequestList]:
    """Return the request list of every rank, by rank. Raises the errors of the transport."""
    encoded = b"" if request_list == _NO_REQUESTS else _encode(request_list)
    trailers = transport.all_reduce(NOTHING, _trailer(encoded))
    if all(trailer[0] != _TOO_LONG for trailer in trailers):
        return [_received(trailer[1 : 1 + trailer[0]]) for trailer in trailers]
    return [_received(each) for each in transport.all_gather(encoded)]


def _trailer(encoded: bytes) -> bytes:
    if len(encoded) >= TRAILER_BYTES:
        return bytes([_TOO_LONG]).ljust(TRAILER_BYTES, b"\0")
    return (bytes([len(encoded)]) + encoded).ljust(TRAILER_BYTES, b"\0")


def _received(encoded: bytes) -> RequestList:
    return _decode(encoded) if encoded else _NO_REQUESTS
