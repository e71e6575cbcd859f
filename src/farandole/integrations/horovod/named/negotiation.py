"""Decide on the operations to run: each rank gets the request lists of all ranks, and decides alike. Pure.

engine.py calls it round after round. The order in which one rank submitted its operations has no effect, so that ranks
may submit in different orders and over different rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from farandole.errors import ProtocolError
from farandole.integrations.horovod.named.match_cache import ResponseCache
from farandole.integrations.horovod.named.pending import PendingTable, Stall
from farandole.integrations.horovod.named.stages import (
    END,
    GLOBAL_SET,
    AllJoined,
    Execute,
    Fail,
    Key,
    Kind,
    MatchedOperation,
    Members,
    PendingOperation,
    Request,
    RequestList,
    Response,
    SetAdded,
    SetRemoved,
    fail_after_end,
    fail_contradictory,
    fail_expired,
    fail_group,
    fail_outsiders,
    ranks_in_words,
    why_invalid,
)
from farandole.training.collectives.transport import Reduction

_SET_CHANGES = {Kind.ADD_PROCESS_SET, Kind.REMOVE_PROCESS_SET}
_CACHED = set(Kind) - _SET_CHANGES - {Kind.JOIN, Kind.BARRIER, Kind.END}


class Negotiation:
    """A rank's copy of all ranks' pending operations. For one thread.

    The copies stay equal as long as they receive the same request lists.

    Args:
        size: The number of ranks.
        cache_capacity: The number of cached operations; repeating a cached request costs one number. 0 for none.
        fusion_bytes: Up to this size, similar allreduces share one Execute; 0 for none. Groups always share one.
    """

    def __init__(self, size: int, cache_capacity: int = 1024, fusion_bytes: int = 64 << 20) -> None:
        self._size = size
        self._fusion_bytes = fusion_bytes
        self._sets = ProcessSets(size)
        self._pending = PendingTable()
        self._cache = ResponseCache(cache_capacity)
        self._repeated_rounds = RepeatedRounds()
        self._joined = 0  # ranks that wait in a join(), over all process sets

    def request_list(self, rank: int, requests: Iterable[Request], expired: Iterable[Key] = ()) -> RequestList:
        """Return a rank's request list for the next round. It must be used in that round. `expired` are the keys of
        operations to give up: all ranks that have submitted them get an error."""
        place_of = self._cache.place_of
        new: list[Request] = []
        repeated: list[int] = []
        for request in requests:
            place = place_of(rank, request)
            if place is None:
                new.append(request)
            else:
                repeated.append(place)
        return RequestList(tuple(new), tuple(repeated), tuple(expired))

    def round(self, request_lists: Sequence[RequestList]) -> list[Response]:
        """Decide from the request lists of all ranks, by rank. All ranks must carry out the responses in this order.
        Raises ProtocolError, on all ranks, for an invalid request list; the negotiation is over then."""
        is_plain = (
            not self._joined and not self._pending and not any(each.requests or each.expired for each in request_lists)
        )
        repeated = tuple([each.repeated for each in request_lists]) if is_plain else ()
        if is_plain and (known := self._repeated_rounds.get(repeated)) is not None:
            self._cache.touch(known.places)
            return list(known.responses)
        responses = self._decide(request_lists)
        if is_plain and not self._pending:
            self._remember(repeated, responses)
        return responses

    def requested(self, request_lists: Sequence[RequestList]) -> Iterator[tuple[int, Key]]:
        """Yield (rank, key) for each operation requested in a round that is not decided yet: for the timeline."""
        for rank, request_list in enumerate(request_lists):
            for place in request_list.repeated:
                yield rank, self._cache.at(place, rank).key
            for request in request_list.requests:
                yield rank, request.key

    def waiting(self) -> list[Stall]:
        """Return all operations that wait for ranks, oldest first. Joins are not among them, nor is the end."""
        operations = [pending for pending in self._pending.all() if pending.key != END]
        return [
            Stall(pending.key, tuple(pending.requested_by()), tuple(awaited), pending.number)
            for pending, awaited in zip(operations, self._pending.all_awaited(operations), strict=True)
        ]

    # One round -------------------------------------------------------------------------------------------

    def _decide(self, request_lists: Sequence[RequestList]) -> list[Response]:
        fails = self._receive(request_lists)
        matched: list[MatchedOperation] = []
        set_changes: list[PendingOperation] = []
        for pending in self._pending.take_complete():
            match = self._match(pending)
            if isinstance(match, Fail):
                fails.append(match)
            elif pending.key.kind in _SET_CHANGES:
                set_changes.append(pending)
            else:
                matched.append(match)
        executes = fuse(matched, self._fusion_bytes)
        for group in self._pending.take_complete_groups():
            matches = [self._match(pending) for pending in group]
            bad = [match for match in matches if isinstance(match, Fail)]
            good = [match for match in matches if isinstance(match, MatchedOperation)]
            fails += fail_group(group, bad) if bad else ()
            if not bad:
                matched += good
                executes += fuse(good, math.inf)
        fails += self._give_up(request_lists)
        for cluster in self._pending.take_contradictory():
            fails += fail_contradictory(cluster)
        fails += self._fail_after_end()
        self._use(matched)
        return [*fails, *executes, *self._all_joined(), *self._change_sets(set_changes)]

    def _receive(self, request_lists: Sequence[RequestList]) -> list[Response]:
        """Receive all requests, then all joins. Returns the failures of operations that were submitted to unknown
        process sets."""
        if len(request_lists) != self._size:
            raise ProtocolError(f"a round has the request lists of {self._size} ranks, got {len(request_lists)}")
        add, at, get = self._pending.add, self._cache.at, self._sets.get
        unknown: dict[Key, None] = {}
        joins: list[tuple[Members, int, Key]] = []
        for rank, request_list in enumerate(request_lists):
            for place in request_list.repeated:
                cached = at(place, rank)
                repeated = cached.request_of(rank)
                if repeated is None:
                    raise ProtocolError(f"rank {rank} repeats a request that it never sent: place {place} of the cache")
                if get(cached.key.process_set) is None:
                    unknown[cached.key] = None
                else:
                    add(cached.members, rank, repeated, cached)
            for request in request_list.requests:
                members = get(request.key.process_set)
                if members is None or (request.key.kind is Kind.JOIN and rank not in members.places):
                    unknown[request.key] = None
                elif request.key.kind is Kind.JOIN:
                    joins.append((members, rank, request.key))
                else:
                    add(members, rank, request, None)
        for members, rank, key in joins:
            if rank in members.joined:
                raise ProtocolError(f"rank {rank} joined twice")
            self._pending.join(members, rank)
            members.joined[rank] = key
            self._joined += 1
        return [Fail(key, self._why_unknown(key)) for key in unknown]

    def _match(self, pending: PendingOperation) -> MatchedOperation | Fail:
        """Check that the requests of all members agree."""
        key, members = pending.key, pending.members
        is_from_all = not pending.outsiders and not (members.joined and None in pending.requests)
        if pending.cached is not None and is_from_all:
            return pending.cached
        if pending.outsiders:
            return fail_outsiders(pending)
        problem = why_invalid(key, members.ranks, pending.requests)
        if problem is not None:
            return Fail(key, problem)
        return MatchedOperation(key, members, tuple(pending.requests))

    def _give_up(self, request_lists: Sequence[RequestList]) -> list[Response]:
        expired = dict.fromkeys(key for request_list in request_lists for key in request_list.expired)
        fails: list[Response] = []
        for key in expired:
            if (pending := self._pending.get(key)) is not None:
                awaited = self._pending.awaited(pending)
                together = self._pending.cluster([pending], by_name=False)
                fails += fail_expired(pending, awaited, self._pending.take(together))
        return fails

    def _fail_after_end(self) -> list[Fail]:
        """Fail what waits for a rank that has left the elastic function: it would wait for ever."""
        end = self._pending.get(END)
        if end is None:
            return []
        ended = end.requested_by()
        operations = [pending for pending in self._pending.all() if pending is not end]
        all_awaited = self._pending.all_awaited(operations)
        stuck = [each for each, awaited in zip(operations, all_awaited, strict=True) if set(ended) & set(awaited)]
        if not stuck:
            return []
        together = [end, *self._pending.cluster(stuck, by_name=False)]
        return fail_after_end(ended, stuck[0], self._pending.take(together))

    def _all_joined(self) -> list[Response]:
        responses: list[Response] = []
        if self._joined:
            for members in self._sets:
                if len(members.joined) == len(members.ranks):
                    responses.append(AllJoined(members.number, next(reversed(members.joined))))
                    self._joined -= len(members.joined)
                    members.joined.clear()
        return responses

    def _change_sets(self, changes: Sequence[PendingOperation]) -> list[Response]:
        responses: list[Response] = []
        for pending in changes:
            ranks = next(request for request in pending.requests if request is not None).ranks
            change = self._add if pending.key.kind is Kind.ADD_PROCESS_SET else self._remove
            responses += change(pending.key, ranks)
        return responses

    def _add(self, key: Key, ranks: tuple[int, ...]) -> list[Response]:
        if problem := self._sets.why_impossible(ranks):
            return [Fail(key, problem)]
        return [SetAdded(key, self._sets.add(ranks), ranks)]

    def _remove(self, key: Key, ranks: tuple[int, ...]) -> list[Response]:
        number = self._sets.number_of(ranks)
        if number is None or number == GLOBAL_SET:
            why = "it has all ranks" if number == GLOBAL_SET else "there is no such process set"
            return [Fail(key, f"the process set of ranks {list(ranks)} cannot be removed: {why}")]
        members = self._sets.get(number)
        assert members is not None
        left = self._pending.take(each for each in self._pending.all() if each.members is members)
        keys = dict.fromkeys([*(each.key for each in left), *members.joined.values()])
        self._joined -= len(members.joined)
        self._sets.remove(number)
        self._repeated_rounds.clear()
        return [*(Fail(each, self._why_unknown(each)) for each in keys), SetRemoved(key, number)]

    # Cache -------------------------------------------------------------------------------------------------

    def _use(self, matched: Iterable[MatchedOperation]) -> None:
        """Put all executed operations into the cache, if all members can repeat them."""
        for operation in matched:
            if operation.key.kind in _CACHED and None not in operation.requests:
                changed = self._cache.use(operation)
                if changed is not None:
                    self._repeated_rounds.forget_place(changed)

    def _remember(self, repeated: Repeated, responses: list[Response]) -> None:
        """Store the responses, to be used again when all ranks repeat exactly these requests."""
        executes = [each for each in responses if isinstance(each, Execute)]
        if len(executes) == len(responses):
            keys = [operation.key for execute in executes for operation in execute.operations]
            self._repeated_rounds.add(repeated, RepeatedRound(tuple(executes), self._cache.places(keys)))

    # Messages ----------------------------------------------------------------------------------------------

    def _why_unknown(self, key: Key) -> str:
        number = key.process_set
        members = self._sets.get(number)
        if members is not None:
            return f"{key.name}: process set {number} has {ranks_in_words(members.ranks)} only"
        was = "was removed" if self._sets.has_existed(number) else "was never added"
        return f"{key.name}: process set {number} {was}"


def fuse(matched: Iterable[MatchedOperation], fusion_bytes: float) -> list[Execute]:
    """Fuse operations: allreduces of one kind share a flat buffer up to a size. Return each operation once, in the
    order of the first of each buffer."""
    buffers: list[list[MatchedOperation]] = []
    last: dict[tuple[object, ...], tuple[list[MatchedOperation], float]] = {}
    for operation in matched:
        fusion_key, nbytes = operation.fusion_key, operation.nbytes
        if fusion_key is not None and (open_one := last.get(fusion_key)) and open_one[1] + nbytes <= fusion_bytes:
            buffer, held = open_one
            buffer.append(operation)
        else:
            buffer, held = [operation], 0
            buffers.append(buffer)
        if fusion_key is not None:
            last[fusion_key] = buffer, held + nbytes
    return [Execute(tuple(buffer)) for buffer in buffers]


class ProcessSets:
    """All process sets, by their ids: 0 has all ranks, the others are numbered from 1 in the order of their creation.
    An id is never used for another set, so that two sets cannot be confused."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._next = GLOBAL_SET + 1
        self._by_number = {GLOBAL_SET: Members(GLOBAL_SET, tuple(range(size)))}

    def __iter__(self) -> Iterator[Members]:
        return iter(self._by_number.values())

    def get(self, number: int) -> Members | None:
        """Return a set; None if it does not exist, or not any more."""
        return self._by_number.get(number)

    def has_existed(self, number: int) -> bool:
        return GLOBAL_SET < number < self._next

    def number_of(self, ranks: tuple[int, ...]) -> int | None:
        """Return the id of the set of these ranks, None if there is none."""
        return next((each.number for each in self if each.ranks == ranks), None)

    def why_impossible(self, ranks: tuple[int, ...]) -> str | None:
        """Return why a new set of these ranks cannot be added; None if it can."""
        if not ranks or list(ranks) != sorted(set(ranks)) or ranks[0] < 0 or ranks[-1] >= self._size:
            return f"a process set has some of the ranks 0 to {self._size - 1}, sorted, each once; got {list(ranks)}"
        number = self.number_of(ranks)
        return None if number is None else f"there is a process set of ranks {list(ranks)} already, with id {number}"

    def add(self, ranks: tuple[int, ...]) -> int:
        """Add a set that is possible, and return its id."""
        number, self._next = self._next, self._next + 1
        self._by_number[number] = Members(number, ranks)
        return number

    def remove(self, number: int) -> None:
        del self._by_number[number]


# Rounds in which all ranks only repeat requests -----------------------------------------------------------------------
#
# The responses of such rounds are remembered. The rounds of training steps are of this kind, so they cost next to
# nothing.

Repeated: TypeAlias = tuple[tuple[int, ...], ...]
"""For each rank, the places in the cache of the requests that it repeats."""

_MOST_REMEMBERED = 64


@dataclass(frozen=True)
class RepeatedRound:
    """The responses of a round, and the places in the cache, in the order of use."""

    responses: tuple[Execute, ...]
    places: tuple[int, ...]


class RepeatedRounds:
    """Recent rounds that repeat cached requests. They are valid while the cache keeps the same in these places."""

    def __init__(self) -> None:
        self._rounds: dict[Repeated, RepeatedRound] = {}
        self._places: set[int] = set()

    def get(self, repeated: Repeated) -> RepeatedRound | None:
        return self._rounds.get(repeated)

    def add(self, repeated: Repeated, known: RepeatedRound) -> None:
        if len(self._rounds) >= _MOST_REMEMBERED:
            self.clear()
        self._rounds[repeated] = known
        self._places.update(known.places)

    def forget_place(self, place: int) -> None:
        """Forget the rounds that use this place: the cache has another operation there now."""
        if place in self._places:
            self.clear()

    def clear(self) -> None:
        self._rounds.clear()
        self._places.clear()


# Horovod's names for the reduction operators, which users pass as `op` ------------------------------------------------

Average = Reduction.AVERAGE
"""The sum over the ranks, divided by their number. See the example of `allreduce`."""

Sum = Reduction.SUM
"""The sum over the ranks; of bools *or*. See the example of `allreduce`."""

Adasum = Reduction.ADASUM
"""A sum that adapts to the angle between gradients (Maleki et al., 2020). See the example of `allreduce`."""

Min = Reduction.MIN
"""The smallest value of each element. See the example of `allreduce`."""

Max = Reduction.MAX
"""The largest value of each element. See the example of `allreduce`."""

Product = Reduction.PRODUCT
"""The product over the ranks; of bools *and*. See the example of `allreduce`."""
