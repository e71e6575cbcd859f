"""Decide on the operations to run: each rank receives the payloads of all ranks, and decides alike. Pure.

engine.py calls it round after round. The order in which one rank submitted its operations has no effect, so that ranks
may submit in different orders and over different rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from farandole.collectives.named.fusion import Matched, ResponseCache, fuse
from farandole.collectives.named.operation_requests import (
    GLOBAL_SET,
    Agreed,
    AllJoined,
    Decision,
    Execute,
    Fail,
    Key,
    Kind,
    Request,
    RoundPayload,
    SetAdded,
    SetRemoved,
)
from farandole.collectives.named.outstanding import Outstanding, Pending
from farandole.collectives.named.process_set_members import Members, ProcessSets
from farandole.collectives.named.validation import ranks_in_words, who_says_what, why_invalid
from farandole.errors import ProtocolError

_SET_CHANGES = {Kind.ADD_PROCESS_SET, Kind.REMOVE_PROCESS_SET}
_CACHED = set(Kind) - _SET_CHANGES - {Kind.JOIN, Kind.BARRIER}


@dataclass(frozen=True)
class UnmatchedOperation:
    """An operation that waits for ranks.

    Attributes:
        submitted_by: The global ranks that have submitted it.
        missing: The global ranks that have not submitted it, or not all of its group.
        number: Distinguishes it from an earlier or later one of the same key.
    """

    key: Key
    submitted_by: tuple[int, ...]
    missing: tuple[int, ...]
    number: int


class Negotiation:
    """A rank's copy of all ranks' outstanding operations. For one thread.

    The copies stay equal as long as they receive the same payloads.

    Args:
        size: The number of ranks.
        cache_capacity: The number of cached operations; repeating a cached request costs one number. 0 for none.
        fusion_bytes: Up to this size, similar allreduces share one Execute; 0 for none. Groups always share one.
    """

    def __init__(self, size: int, cache_capacity: int = 1024, fusion_bytes: int = 64 << 20) -> None:
        self._size = size
        self._fusion_bytes = fusion_bytes
        self._sets = ProcessSets(size)
        self._outstanding = Outstanding()
        self._cache = ResponseCache(cache_capacity)
        self._repeated_rounds = RepeatedRounds()
        self._joined = 0  # ranks that wait in a join(), over all process sets

    def make_payload(self, rank: int, requests: Iterable[Request], expired: Iterable[Key] = ()) -> RoundPayload:
        """Return a rank's payload for the next round. It must be used in that round.

        `expired` are the keys of operations to give up: all ranks that have submitted them get an error.
        """
        place_of = self._cache.place_of
        new: list[Request] = []
        repeated: list[int] = []
        for request in requests:
            place = place_of(rank, request)
            if place is None:
                new.append(request)
            else:
                repeated.append(place)
        return RoundPayload(tuple(new), tuple(repeated), tuple(expired))

    def round(self, payloads: Sequence[RoundPayload]) -> list[Decision]:
        """Decide from the payloads of all ranks, by rank. All ranks must execute the decisions in this order.

        Raises ProtocolError, on all ranks, for an invalid payload; the negotiation is over then.
        """
        is_plain = (
            not self._joined and not self._outstanding and not any(each.requests or each.expired for each in payloads)
        )
        repeated = tuple([each.repeated for each in payloads]) if is_plain else ()
        if is_plain and (plan := self._repeated_rounds.get(repeated)) is not None:
            self._cache.touch(plan.places)
            return list(plan.decisions)
        decisions = self._decide(payloads)
        if is_plain and not self._outstanding:
            self._remember(repeated, decisions)
        return decisions

    def requested(self, payloads: Sequence[RoundPayload]) -> Iterator[tuple[int, Key]]:
        """Yield (rank, key) for each operation submitted in a round that is not decided yet: for the timeline."""
        for rank, payload in enumerate(payloads):
            for place in payload.repeated:
                yield rank, self._cache[place].agreed.key
            for request in payload.requests:
                yield rank, request.key

    def waiting(self) -> list[UnmatchedOperation]:
        """Return all operations that wait for ranks, oldest first, for reports of stalls. Joins are not among them."""
        pendings = self._outstanding.all()
        return [
            UnmatchedOperation(pending.key, tuple(pending.submitted_by()), tuple(awaited), pending.number)
            for pending, awaited in zip(pendings, self._outstanding.all_awaited(pendings), strict=True)
        ]

    # One round -------------------------------------------------------------------------------------------

    def _decide(self, payloads: Sequence[RoundPayload]) -> list[Decision]:
        fails = self._receive(payloads)
        matched: list[Matched] = []
        executes: list[Execute] = []
        changes: list[Pending] = []
        for pending in self._outstanding.take_complete():
            match = self._match(pending)
            if isinstance(match, Fail):
                fails.append(match)
            elif pending.key.kind in _SET_CHANGES:
                changes.append(pending)
            else:
                matched.append(match)
        executes += fuse(matched, self._fusion_bytes)
        for group in self._outstanding.take_whole_groups():
            matches = [self._match(pending) for pending in group]
            bad = [match for match in matches if isinstance(match, Fail)]
            good = [match for match in matches if isinstance(match, Matched)]
            fails += fail_group(group, bad) if bad else ()
            if not bad:
                matched += good
                executes += fuse(good, math.inf)
        fails += self._give_up(payloads)
        for cluster in self._outstanding.take_tangled():
            fails += fail_tangled(cluster)
        self._use(matched)
        return [*fails, *executes, *self._all_joined(), *self._change_sets(changes)]

    def _receive(self, payloads: Sequence[RoundPayload]) -> list[Decision]:
        """Receive all submitted operations, then all joins.

        Returns the failures of operations that were submitted to unknown process sets.
        """
        if len(payloads) != self._size:
            raise ProtocolError(f"a round has the payloads of {self._size} ranks, got those of {len(payloads)}")
        add, cache, get = self._outstanding.add, self._cache, self._sets.get
        unknown: dict[Key, None] = {}
        joins: list[tuple[Members, int, Key]] = []
        for rank, payload in enumerate(payloads):
            for place in payload.repeated:
                matched = _at(cache, place, rank)
                request = matched.part_of(rank)
                if request is None:
                    raise ProtocolError(f"rank {rank} repeats what it never said: place {place} of the cache")
                if get(request.key.process_set) is None:
                    unknown[request.key] = None
                else:
                    add(matched.members, rank, request, matched)
            for request in payload.requests:
                members = get(request.key.process_set)
                if members is None or (request.key.kind is Kind.JOIN and rank not in members.places):
                    unknown[request.key] = None
                elif request.key.kind is Kind.JOIN:
                    joins.append((members, rank, request.key))
                else:
                    add(members, rank, request, None)
        for members, rank, key in joins:
            if rank in members.joined:
                raise ProtocolError(f"rank {rank} joins twice")
            self._outstanding.join(members, rank)
            members.joined[rank] = key
            self._joined += 1
        return [Fail(key, self._why_unknown(key)) for key in unknown]

    def _match(self, pending: Pending) -> Matched | Fail:
        """Check that the requests of all members agree."""
        key, members = pending.key, pending.members
        is_from_all = not pending.strangers and not (members.joined and None in pending.parts)
        if pending.matched is not None and is_from_all:
            return pending.matched
        if pending.strangers:
            return fail_strangers(pending)
        problem = why_invalid(key, members.ranks, pending.parts)
        if problem is not None:
            return Fail(key, problem)
        return Matched(members, Agreed(key, members.ranks, tuple(pending.parts)))

    def _give_up(self, payloads: Sequence[RoundPayload]) -> list[Decision]:
        expired = dict.fromkeys(key for payload in payloads for key in payload.expired)
        fails: list[Decision] = []
        for key in expired:
            if (pending := self._outstanding.get(key)) is not None:
                awaited = self._outstanding.awaited(pending)
                together = self._outstanding.cluster([pending], by_name=False)
                fails += give_up(pending, awaited, self._outstanding.take(together))
        return fails

    def _all_joined(self) -> list[Decision]:
        decisions: list[Decision] = []
        if self._joined:
            for members in self._sets:
                if len(members.joined) == len(members.ranks):
                    decisions.append(AllJoined(members.number, next(reversed(members.joined))))
                    self._joined -= len(members.joined)
                    members.joined.clear()
        return decisions

    def _change_sets(self, changes: Sequence[Pending]) -> list[Decision]:
        decisions: list[Decision] = []
        for pending in changes:
            ranks = next(part for part in pending.parts if part is not None).ranks
            decisions += (
                self._add(pending.key, ranks)
                if pending.key.kind is Kind.ADD_PROCESS_SET
                else self._remove(pending.key, ranks)
            )
        return decisions

    def _add(self, key: Key, ranks: tuple[int, ...]) -> list[Decision]:
        if problem := self._sets.why_impossible(ranks):
            return [Fail(key, problem)]
        return [SetAdded(key, self._sets.add(ranks).number, ranks)]

    def _remove(self, key: Key, ranks: tuple[int, ...]) -> list[Decision]:
        number = self._sets.number_of(ranks)
        if number is None or number == GLOBAL_SET:
            why = "it has all ranks" if number == GLOBAL_SET else "there is no such process set"
            return [Fail(key, f"the process set of ranks {list(ranks)} cannot be removed: {why}")]
        members = self._sets.get(number)
        assert members is not None
        left = self._outstanding.take(each for each in self._outstanding.all() if each.members is members)
        keys = dict.fromkeys([*(each.key for each in left), *members.joined.values()])
        self._joined -= len(members.joined)
        self._sets.remove(number)
        self._repeated_rounds.clear()
        return [*(Fail(each, self._why_unknown(each)) for each in keys), SetRemoved(key, number)]

    # Cache -------------------------------------------------------------------------------------------------

    def _use(self, matched: Iterable[Matched]) -> None:
        """Put all executed operations into the cache, if all members can repeat them."""
        for each in matched:
            agreed = each.agreed
            if agreed.key.kind in _CACHED and None not in agreed.parts:
                changed = self._cache.use(each)
                if changed is not None:
                    self._repeated_rounds.forget_place(changed)

    def _remember(self, repeated: tuple[tuple[int, ...], ...], decisions: list[Decision]) -> None:
        """Store the decisions, to be used again when all ranks repeat exactly these requests."""
        executes = [each for each in decisions if isinstance(each, Execute)]
        if len(executes) == len(decisions):
            keys = [agreed.key for execute in executes for agreed in execute.operations]
            self._repeated_rounds.add(repeated, RepeatedRound(tuple(executes), self._cache.places(keys)))

    # Messages ----------------------------------------------------------------------------------------------

    def _why_unknown(self, key: Key) -> str:
        number = key.process_set
        members = self._sets.get(number)
        if members is not None:
            return f"{key.name}: process set {number} has {ranks_in_words(members.ranks)} only"
        was = "was removed" if self._sets.has_existed(number) else "was never added"
        return f"{key.name}: process set {number} {was}"


def _at(cache: ResponseCache, place: int, rank: int) -> Matched:
    try:
        return cache[place]
    except IndexError:
        raise ProtocolError(f"rank {rank} repeats what is in place {place} of the cache, where nothing is") from None


# Errors of operations that depend on each other, for each rank that submitted one of them -----------------------------

_MOST_LISTED = 3  # of one rank's operations


def fail_group(group: Sequence[Pending], bad: Sequence[Fail]) -> list[Fail]:
    """Fail all operations of a group because of some, which have their own message."""
    messages = {fail.key: fail.message for fail in bad}
    why = f"another operation of its group {group[0].group!r} failed: {bad[0].message}"
    return [Fail(each.key, messages.get(each.key) or f"{_what(each.key)}: {why}") for each in group]


def fail_tangled(cluster: Sequence[Pending]) -> list[Fail]:
    """Fail all operations of a cluster; the message lists each rank's operations."""
    said: dict[int, list[str]] = {}
    for pending in cluster:
        for rank, part in zip(pending.members.ranks, pending.parts, strict=True):
            if part is not None:
                group = f" of group {part.group!r} with {part.group_size}" if part.group else ""
                said.setdefault(rank, []).append(_what(pending.key) + group)
    found = who_says_what((rank, _shortened(said[rank])) for rank in sorted(said))
    message = f"ranks disagree on what to do together: {found or 'all have submitted only a part of a group'}"
    return [Fail(pending.key, message) for pending in cluster]


def fail_strangers(pending: Pending) -> Fail:
    """Fail an operation that ranks outside of its process set have submitted."""
    number, ranks = pending.members.number, ranks_in_words(pending.members.ranks)
    who = f"{ranks_in_words(pending.strangers)} submitted it"
    return Fail(pending.key, f"{_what(pending.key)}: {who}, but process set {number} has {ranks}")


def give_up(pending: Pending, awaited: Sequence[int], together: Sequence[Pending]) -> list[Fail]:
    """Fail an operation that has waited for these ranks for too long, and all operations that belong to it."""
    message = (
        f"{_what(pending.key)} was given up after waiting for too long: {ranks_in_words(pending.submitted_by())} "
        f"submitted it, {ranks_in_words(awaited)} did not"
    )
    return [Fail(each.key, message) for each in together]


def _what(key: Key) -> str:
    return f"{key.kind.name.lower()} {key.name!r}"


def _shortened(names: list[str]) -> str:
    more = [f"{len(names) - _MOST_LISTED} more"] if len(names) > _MOST_LISTED else []
    return " and ".join(names[:_MOST_LISTED] + more)


# Rounds in which all ranks only repeat requests -----------------------------------------------------------------------
#
# The decisions of such rounds are remembered. The rounds of training steps are of this kind, so they cost next to
# nothing.

Repeated: TypeAlias = tuple[tuple[int, ...], ...]
"""For each rank, the places in the cache of the requests that it repeats."""

_MOST_REMEMBERED = 64


@dataclass(frozen=True)
class RepeatedRound:
    """The decisions of a round, and the places in the cache, in the order of use."""

    decisions: tuple[Execute, ...]
    places: tuple[int, ...]


class RepeatedRounds:
    """Recent rounds that repeat cached requests. They are valid while the cache keeps the same in these places."""

    def __init__(self) -> None:
        self._repeated_rounds: dict[Repeated, RepeatedRound] = {}
        self._places: set[int] = set()

    def get(self, repeated: Repeated) -> RepeatedRound | None:
        return self._repeated_rounds.get(repeated)

    def add(self, repeated: Repeated, plan: RepeatedRound) -> None:
        if len(self._repeated_rounds) >= _MOST_REMEMBERED:
            self.clear()
        self._repeated_rounds[repeated] = plan
        self._places.update(plan.places)

    def forget_place(self, place: int) -> None:
        """Forget the rounds that use this place: the cache has another operation there now."""
        if place in self._places:
            self.clear()

    def clear(self) -> None:
        self._repeated_rounds.clear()
        self._places.clear()
