"""Run the named collectives of one generation in a thread that matches the operations of all ranks and executes them.

Callers submit from any thread and in any order, and wait on handles. The thread sleeps until this rank has submitted an
operation or another rank has begun a round; then all ranks exchange their payloads, make the same decision
(negotiation.py) and execute it in the same order (execution.py). A world of one does all this in the calling thread.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import msgspec
import torch

from farandole.clock import now_s
from farandole.collectives import world
from farandole.collectives.alone import AloneTransport
from farandole.collectives.named.execution import Execution
from farandole.collectives.named.negotiation import Negotiation
from farandole.collectives.named.operation import Operation
from farandole.collectives.named.operation_requests import (
    GLOBAL_SET,
    AllJoined,
    Decision,
    Execute,
    Fail,
    Key,
    Kind,
    RoundPayload,
    SetAdded,
    SetRemoved,
)
from farandole.collectives.named.settings import NamedSettings
from farandole.collectives.named.stall import StallWatch
from farandole.collectives.named.submitted import Submitted, Wake
from farandole.collectives.named.timeline import Timeline, process_timeline
from farandole.collectives.transport import Transport
from farandole.errors import CollectiveMismatch
from farandole.membership import Placement

logger = logging.getLogger("farandole")

Connect = Callable[[tuple[int, ...], int], Transport]
"""connect(global ranks, process set): connect a transport among these ranks only; all of them call it at once."""

# The time for the other ranks to take part in a round that this one has begun. Only a rank that hangs takes longer.
_CLOSE_TIMEOUT_S = 5.0
_LOOK_EVERY_S = 1.0  # the interval of checks for stalls; a waiting thread wakes up as often


class NamedCollectives:
    """All operations that are matched by name, from the start of a generation to its end.

    Args:
        transport: A transport of its own, on which no other code runs collectives. close() closes it.
        connect: Opens the connections of a process set.
        timeline: Receives the events; None for that of start_timeline().
    """

    def __init__(
        self,
        transport: Transport,
        *,
        placement: Placement,
        connect: Connect,
        settings: NamedSettings | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.settings = settings or NamedSettings()
        self._rank, self._size = placement.rank, placement.size
        self._connect = connect
        self._rounds = Rounds(transport)
        self._negotiation = Negotiation(placement.size, self.settings.cache_capacity, self.settings.fusion_bytes)
        self._stalls = StallWatch(self.settings.stall_warning_s, self.settings.stall_abort_s)
        self._next_look_s = 0.0
        self._expired: Sequence[Key] = ()
        self._timeline = timeline or process_timeline
        self._execution = Execution(self._timeline)
        self._transports: dict[int, Transport] = {GLOBAL_SET: transport}
        self._sets: dict[int, tuple[int, ...]] = {GLOBAL_SET: tuple(range(placement.size))}
        self._numbers: defaultdict[tuple[Kind, int], Iterator[int]] = defaultdict(itertools.count)
        self._wake = Wake() if placement.size > 1 else None
        self._submitted = Submitted(self._wake)
        self._is_closing = False
        self._alone = threading.Lock()
        self._thread: threading.Thread | None = None
        if self._wake is not None:
            self._thread = threading.Thread(
                target=self._run, args=(self._wake,), name="farandole-collectives", daemon=True
            )
            self._thread.start()

    @property
    def rank(self) -> int:
        """The global rank of this worker."""
        return self._rank

    @property
    def process_sets(self) -> Mapping[int, tuple[int, ...]]:
        """The global ranks of each process set, by its id; 0 is the set of all ranks."""
        return MappingProxyType(self._sets)

    def next_number(self, kind: Kind, process_set: int) -> int:
        """Return the number for an unnamed operation: the same on all members, as long as all submit the same."""
        return next(self._numbers[kind, process_set])

    def submit(self, operations: Sequence[Operation]) -> None:
        """Submit operations; the other ranks learn of all of them in one round. Callable from any thread.

        Raises ValueError when one of the names is in flight in its process set, and the error that ended this
        generation if it has ended; then none is submitted. Raises StepError where collectives are refused (world.py).
        """
        if operations:
            world.raise_if_refused(operations[0].key.name)
        self._submitted.add(operations)
        if self._thread is None:
            self._run_alone()

    def raise_if_ended(self) -> None:
        """Raise the error that would end an operation now; for a world of one, where no other rank needs it."""
        self._submitted.add(())
        self._transports[GLOBAL_SET].barrier()

    def abort(self, reason: str) -> None:
        """End running, waiting and later operations with GenerationEnded. Callable from any thread."""
        for transport in list(self._transports.values()):
            transport.abort(reason)

    def wait_until_quiet(self) -> None:
        """Wait, after abort(), until all handles have ended and no tensor of the user is touched any more."""
        if self._thread is None:
            self._run_alone()
        else:
            self._thread.join()

    def close(self) -> None:
        """Take part in a round that has begun, then leave. Operations that still wait end with GenerationEnded.

        Idempotent; returns at once after abort().
        """
        self._is_closing = True
        if self._thread is not None and self._thread.is_alive():
            self._submitted.wake()
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
            while self._wait_for_reason(wake):
                self._round()
        except BaseException as error:  # noqa: BLE001 - every handle gets it
            self._end(error)

    def _run_alone(self) -> None:
        with self._alone:
            try:
                self._round()
            except BaseException as error:  # noqa: BLE001 - as in _run
                self._end(error)

    def _wait_for_reason(self, wake: Wake) -> bool:
        """Wait until a round is due. Return False when this rank is to leave instead."""
        transport = self._transports[GLOBAL_SET]
        while not self._submitted.has_unsaid:
            if self._is_closing:
                return False
            if self._looks_for_stalls():
                return True
            was_called = transport.wait_for_peer(wake.descriptor)
            if was_called or (was_called is False and not wake.is_set and self._is_over_for_all()):
                return True
        return True

    def _is_over_for_all(self) -> bool:
        """Return whether this rank must find out why a neighbour has gone, without which no round can end.

        If no operation waits here, the neighbour may have finished normally. But the ranks beyond, which cannot see it,
        must not wait for it.
        """
        if self._submitted.is_empty:
            self.abort("a neighbouring rank has left")
        return not self._submitted.is_empty

    def _looks_for_stalls(self) -> bool:
        """Warn, periodically, of operations that stall. Return whether one of them has expired."""
        if self._stalls.is_on and now_s() >= self._next_look_s:
            self._next_look_s = now_s() + _LOOK_EVERY_S
            report = self._stalls.check(now_s(), self._negotiation.waiting())
            self._expired = report.expired
            if self._rank == 0:  # all ranks find the same
                for warning in report.warnings:
                    logger.warning(warning)
        return bool(self._expired)

    def _round(self) -> None:
        """Exchange payloads with all ranks, and execute the decisions. Raises the errors of the transport."""
        unsent = self._submitted.take_unsaid()
        payload = self._negotiation.make_payload(self._rank, [operation.request for operation in unsent], self._expired)
        self._expired = ()
        received = self._rounds.exchange(payload)
        if self._timeline.is_on:
            self._tell_timeline(received)
        for decision in self._negotiation.round(received):
            self._carry_out(decision)

    def _tell_timeline(self, received: Sequence[RoundPayload]) -> None:
        self._timeline.cycle()
        for rank, key in self._negotiation.requested(received):
            self._timeline.negotiate_start(key.name, key.kind)
            self._timeline.rank_ready(key.name, rank)

    def _end(self, error: BaseException) -> None:
        """End this rank's part in all rounds; every other rank, whose next round needs it, ends too."""
        self.abort(f"rank {self._rank} has ended its named collectives: {error}")
        self._submitted.end(error)

    def _end_by_transport(self) -> None:
        """End the waiting operations, after an abort, with the transport's error."""
        try:
            self._transports[GLOBAL_SET].barrier()
        except Exception as error:  # noqa: BLE001 - handed on
            self._submitted.end(error)

    # Decisions -------------------------------------------------------------------------------------------

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Execute():
                self._execute(decision)
            case Fail():
                self._finish(decision, CollectiveMismatch(decision.message))
            case AllJoined():
                self._finish_join(decision)
            case SetAdded():
                self._add_set(decision)
            case SetRemoved():
                self._remove_set(decision)

    def _execute(self, decision: Execute) -> None:
        if self._timeline.is_on:
            for each in decision.operations:
                self._timeline.negotiate_end(each.key.name)
        transport = self._transports.get(decision.operations[0].key.process_set)
        if transport is None:
            return  # an operation of a process set without this rank
        mine = [
            None if each.parts[transport.rank] is None else self._submitted.find(each.key)
            for each in decision.operations
        ]
        self._execution.carry_out(decision.operations, mine, transport)
        self._submitted.forget(mine)

    def _finish(self, decision: Fail | SetAdded | SetRemoved, result: object) -> None:
        """End this rank's part, if it has one, with a result or with an error."""
        self._timeline.negotiate_end(decision.key.name)
        operation = self._submitted.find(decision.key)
        if operation is not None:
            if isinstance(result, BaseException):
                operation.fail(result)
            else:
                operation.finish(result)
            self._submitted.forget([operation])

    def _finish_join(self, decision: AllJoined) -> None:
        # Ranks that joined early submitted less: from here on the counts are equal again. The set has nothing in
        # flight.
        for key in list(self._numbers):
            if key[1] == decision.process_set:
                del self._numbers[key]
        for operation in self._submitted.in_flight():
            if operation.key.kind is Kind.JOIN and operation.key.process_set == decision.process_set:
                operation.finish(decision.last_rank)
                self._submitted.forget([operation])

    def _add_set(self, decision: SetAdded) -> None:
        """Open the connections of a new process set. Its members do so at the same point of the same round."""
        ranks = decision.ranks
        self._sets[decision.process_set] = ranks
        if self._rank in ranks:
            alone = len(ranks) == 1
            transport = AloneTransport() if alone else self._connect(ranks, decision.process_set)
            self._transports[decision.process_set] = transport
        self._finish(decision, decision.process_set)

    def _remove_set(self, decision: SetRemoved) -> None:
        """Close the connections of a process set. Operations that waited in it have failed before."""
        self._sets.pop(decision.process_set, None)
        transport = self._transports.pop(decision.process_set, None)
        if transport is not None:
            transport.close()
        self._finish(decision, True)


# The exchange of a round: the payload of every rank goes to every rank ------------------------------------------------
#
# Payloads travel in a trailer of fixed length, which takes one trip around the ring and no agreement on lengths
# before. A second exchange follows only when some rank's payload does not fit.

TRAILER_BYTES = 64

_TOO_LONG = 0xFF
_NOTHING_NEW = RoundPayload()

_encode: Callable[[RoundPayload], bytes] = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes], RoundPayload] = msgspec.msgpack.Decoder(RoundPayload).decode


class Rounds:
    """Exchanges payloads over one transport. For one thread."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._nothing = torch.empty(0)

    def exchange(self, payload: RoundPayload) -> list[RoundPayload]:
        """Return the payload of every rank, by rank. Raises the errors of the transport."""
        encoded = b"" if payload == _NOTHING_NEW else _encode(payload)
        trailers = self._transport.all_reduce(self._nothing, _trailer(encoded))
        if all(trailer[0] != _TOO_LONG for trailer in trailers):
            return [_received(trailer[1 : 1 + trailer[0]]) for trailer in trailers]
        return [_received(each) for each in self._transport.all_gather(encoded)]


def _trailer(encoded: bytes) -> bytes:
    if len(encoded) >= TRAILER_BYTES:
        return bytes([_TOO_LONG]).ljust(TRAILER_BYTES, b"\0")
    return (bytes([len(encoded)]) + encoded).ljust(TRAILER_BYTES, b"\0")


def _received(encoded: bytes) -> RoundPayload:
    return _decode(encoded) if encoded else _NOTHING_NEW
