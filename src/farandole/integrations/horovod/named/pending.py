"""Operations that some ranks have requested and others have not: their table, and the stalls in it. Pure.

negotiation.py decides them. An ungrouped operation is complete when all members that have not joined have requested it.
A group is decided as a whole: every member has to have requested all operations that it assigns to the group. Where
ranks disagree on the members of a group, or on the operation that a name stands for, all operations involved form one
cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from farandole.errors import ProtocolError
from farandole.integrations.horovod.named.stages import (
    Key,
    Kind,
    MatchedOperation,
    Members,
    PendingOperation,
    Request,
    operation_in_words,
    ranks_in_words,
)

Label: TypeAlias = tuple[int, str]
"""A process set, and the name of a group or of an operation."""

_PREFIXES = {
    kind: (f"grouped_{kind.name.lower()}.", f"{kind.name.lower()}.")
    for kind in (Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST, Kind.ALLTOALL, Kind.REDUCESCATTER)
}
_UNNAMED = "noname."  # each kind counts its unnamed operations: equal numbers of two kinds are unrelated

_LISTED_STALLS = 5  # the number of operations that a warning names for one set of awaited ranks


class PendingTable:
    """The table of all pending operations, equal on all ranks. Horovod's message table."""

    def __init__(self) -> None:
        self._by_key: dict[Key, PendingOperation] = {}
        self._groups: dict[Label, OperationGroup] = {}
        self._by_name: dict[Label, list[PendingOperation]] = {}  # by bare name, without operations of this round
        self._groups_by_name: dict[Label, list[OperationGroup]] = {}
        self._new: list[PendingOperation] = []
        self._complete: list[PendingOperation] = []
        self._changed_groups: dict[Label, OperationGroup] = {}
        self._was_split = False  # a group has left: a cluster that it connected may be several now
        self._count = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def all(self) -> list[PendingOperation]:
        return list(self._by_key.values())

    def get(self, key: Key) -> PendingOperation | None:
        return self._by_key.get(key)

    def add(self, members: Members, rank: int, request: Request, cached: MatchedOperation | None) -> None:
        """Add the request of a rank. `cached` is given if the rank repeats the request of this cached operation."""
        key = request.key
        pending = self._by_key.get(key)
        if pending is None:
            self._count += 1
            pending = self._by_key[key] = PendingOperation(key, members, cached, self._count)
            self._new.append(pending)
        place = members.places.get(rank)
        if place is None:
            pending.outsiders.append(rank)
            return
        requests = pending.requests
        if requests[place] is not None:
            raise ProtocolError(f"rank {rank} requested {operation_in_words(key)} twice, before it was decided")
        requests[place] = request
        if cached is not pending.cached:
            pending.cached = None
        is_active = rank not in members.joined
        if is_active:
            pending.missing -= 1
        if request.group or pending.group:
            self._add_to_group(pending, rank, request)
        else:
            pending.group = ""
            if is_active and not pending.missing:
                self._complete.append(pending)

    def join(self, members: Members, rank: int) -> None:
        """Mark that this member requests nothing more. Called after all requests of the same round were added."""
        place = members.places[rank]
        for pending in self._by_key.values():
            if pending.members is members and pending.requests[place] is None:
                pending.missing -= 1
                if not pending.missing and not pending.group and not pending.is_mixed:
                    self._complete.append(pending)
        self._changed_groups.update((label, group) for label, group in self._groups.items() if group.members is members)

    def take_complete(self) -> list[PendingOperation]:
        """Take the ungrouped operations that every member has requested by now, in the order of their completion."""
        complete, self._complete = self._complete, []
        complete = [pending for pending in complete if not pending.is_mixed]
        for pending in complete:
            del self._by_key[pending.key]
        self._forget_names(complete)
        return complete

    def take_complete_groups(self) -> list[list[PendingOperation]]:
        """Take the groups that every member has requested with the same operations."""
        groups = [group for group in self._changed_groups.values() if group.is_complete() and group.is_consistent()]
        return [self.take(group.operations.values()) for group in groups]

    def take_contradictory(self) -> list[list[PendingOperation]]:
        """Take the clusters that can never match: every member has requested all of its operations, and they differ."""
        seeds = self._names_with_several_meanings()
        # A group that is not mixed, and has no such name in it, is a cluster of its own.
        is_simple = not seeds
        groups = self._groups if self._was_split else self._changed_groups
        self._was_split = False
        for group in groups.values():
            if group.is_mixed or not is_simple or group.is_complete():
                seeds.append(list(group.operations.values()))
        self._changed_groups = {label: group for label, group in self._changed_groups.items() if group.is_mixed}
        clusters = []
        for seed in seeds:
            still = [pending for pending in seed if self._by_key.get(pending.key) is pending]
            cluster = self.cluster(still)
            if cluster and all(self._is_through(rank, cluster) for rank in cluster[0].members.active()):
                clusters.append(self.take(cluster))
        return clusters

    def cluster(self, seeds: Iterable[PendingOperation], by_name: bool = True) -> list[PendingOperation]:
        """Return these and all operations that depend on them: by groups, and by names with several meanings."""
        found: dict[Key, PendingOperation] = {}
        todo = list(seeds)
        while todo:
            pending = todo.pop()
            if pending.key in found:
                continue
            found[pending.key] = pending
            groups = self._groups_of(pending)
            if by_name:
                for bare in (_bare(pending.key, pending.key.name), *(group.bare for group in groups)):
                    if bare is not None:
                        todo += self._by_name.get(bare, ())
                        groups = groups + self._groups_by_name.get(bare, [])
            for group in groups:
                todo += [each for each in group.operations.values() if each.key not in found]
        return sorted(found.values(), key=lambda pending: pending.number)

    def take(self, operations: Iterable[PendingOperation]) -> list[PendingOperation]:
        """Remove decided operations."""
        taken = sorted(operations, key=lambda pending: pending.number)
        for pending in taken:
            del self._by_key[pending.key]
            for group in self._groups_of(pending):
                del group.operations[pending.key]
                if not group.operations:
                    del self._groups[group.label]
                    self._changed_groups.pop(group.label, None)
                    _drop(self._groups_by_name, group.bare, group)
                    self._was_split = True
        self._forget_names(taken)
        return taken

    def awaited(self, pending: PendingOperation) -> list[int]:
        """Return the members that have not requested this operation. If all have, return those that lack a part of the
        cluster."""
        return self.all_awaited([pending])[0]

    def all_awaited(self, operations: Sequence[PendingOperation]) -> list[list[int]]:
        """Return awaited() for each of these."""
        of_cluster: dict[Key, list[int]] = {}
        found = []
        for pending in operations:
            missing = pending.missing_ranks() or of_cluster.get(pending.key)
            if missing is None:
                cluster = self.cluster([pending])
                missing = [rank for rank in pending.members.active() if not self._is_through(rank, cluster)]
                of_cluster.update((each.key, missing) for each in cluster)
            found.append(missing)
        return found

    # Internals -------------------------------------------------------------------------------------------

    def _add_to_group(self, pending: PendingOperation, rank: int, request: Request) -> None:
        if pending.group is None:
            pending.group = request.group
        elif pending.group != request.group:
            pending.is_mixed = True
        if request.group:
            label = request.key.process_set, request.group
            group = self._groups.get(label)
            if group is None:
                bare = _bare(pending.key, request.group)
                group = self._groups[label] = OperationGroup(label, pending.members, bare)
                if bare is not None:
                    self._groups_by_name.setdefault(bare, []).append(group)
            group.operations[pending.key] = pending
            group.counts[rank] = group.counts.get(rank, 0) + 1
            group.sizes[rank] = max(group.sizes.get(rank, 1), request.group_size)
            self._changed_groups[label] = group
        if pending.is_mixed:
            for group in self._groups_of(pending):
                group.is_mixed = True
                self._changed_groups[group.label] = group

    def _groups_of(self, pending: PendingOperation) -> list[OperationGroup]:
        if not pending.group and not pending.is_mixed:
            return []
        number = pending.key.process_set
        names = {each.group: None for each in pending.requests if each is not None and each.group}
        return [group for name in names if (group := self._groups.get((number, name))) is not None]

    def _names_with_several_meanings(self) -> list[list[PendingOperation]]:
        """Return operations of several kinds to which the user gave one name. An operation counts from the end of its
        first round on: most are decided by then, and cost nothing."""
        for pending in self._new:
            if self._by_key.get(pending.key) is pending and (bare := _bare(pending.key, pending.key.name)):
                self._by_name.setdefault(bare, []).append(pending)
        self._new = []
        groups = self._groups_by_name
        found = [same for bare, same in self._by_name.items() if len(same) > 1 or bare in groups]
        return found + [list(same[0].operations.values()) for same in groups.values() if len(same) > 1]

    def _is_through(self, rank: int, cluster: Sequence[PendingOperation]) -> bool:
        """Return whether this member has requested a part of the cluster, and all of the groups that it began."""
        place = cluster[0].members.places[rank]
        own = [pending for pending in cluster if pending.requests[place] is not None]
        groups = {group.label: group for pending in own for group in self._groups_of(pending)}
        return bool(own) and all(group.is_complete_from(rank) for group in groups.values() if rank in group.counts)

    def _forget_names(self, decided: Sequence[PendingOperation]) -> None:
        if self._by_name:
            for pending in decided:
                _drop(self._by_name, _bare(pending.key, pending.key.name), pending)


def _bare(key: Key, name: str) -> Label | None:
    """Return the user's name for an operation of this key, or for its group, without the kind of operation. Ranks that
    mean the same use the same name. None where the user gave no name."""
    prefixes = _PREFIXES.get(key.kind)
    if prefixes is None:
        return None
    bare = name.removeprefix(prefixes[0]).removeprefix(prefixes[1])
    return None if bare.startswith(_UNNAMED) else (key.process_set, bare)


T = TypeVar("T")


def _drop(table: dict[Label, list[T]], bare: Label | None, value: T) -> None:
    same = None if bare is None else table.get(bare)
    if bare is not None and same is not None and value in same:
        same.remove(value)
        if not same:
            del table[bare]


class OperationGroup:
    """Operations that at least one rank wants to be executed together.

    Attributes:
        counts: The number of its operations that each rank has requested.
        sizes: The number of operations that each rank declares.
        is_mixed: Whether some rank requested one of its operations outside of it.
        bare: The user's name for it.
    """

    __slots__ = ("bare", "counts", "is_mixed", "label", "members", "operations", "sizes")

    def __init__(self, label: Label, members: Members, bare: Label | None) -> None:
        self.label, self.members, self.bare = label, members, bare
        self.operations: dict[Key, PendingOperation] = {}
        self.counts: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.is_mixed = False

    def is_complete_from(self, rank: int) -> bool:
        """Return whether this rank has requested all of it."""
        return self.counts.get(rank, 0) >= self.sizes.get(rank, 1)

    def is_complete(self) -> bool:
        """Return whether every member that has not joined has requested all of it."""
        return all(map(self.is_complete_from, self.members.active()))

    def is_consistent(self) -> bool:
        """Return whether all members requested the same operations, once it is complete."""
        count = len(self.operations)
        return (
            not self.is_mixed
            and all(size == count for size in self.sizes.values())
            and all(not pending.missing for pending in self.operations.values())
        )


# Stalls: decide when to warn of an operation that waits for ranks, and when to give it up -----------------------------
#
# Usually some rank takes another path through the script, and will never submit it.


@dataclass(frozen=True)
class Stall:
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


@dataclass(frozen=True)
class StallReport:
    """The result of one check of the waiting operations.

    Attributes:
        warnings: Sentences for the log: the same on all ranks, so that one of them is enough to log them.
        expired: Operations that have waited for too long; to be sent in the next round.
    """

    warnings: tuple[str, ...] = ()
    expired: tuple[Key, ...] = ()


_NO_STALLS = StallReport()


class StallWatch:
    """Checks the waiting operations periodically; the resolution of its times is the interval of the checks.

    Args:
        warning_s: Warn of an operation that has waited for this time, in seconds, and again after each such time; 0 for
            never.
        abort_s: An operation that has waited for this time, in seconds, has expired; 0 for never.
    """

    def __init__(self, warning_s: float = 60.0, abort_s: float = 0.0) -> None:
        if warning_s < 0 or abort_s < 0:
            raise ValueError(f"stall times must not be negative, got warning_s={warning_s}, abort_s={abort_s}")
        self._warning_s, self._abort_s = warning_s, abort_s
        self._since_s: dict[tuple[Key, int], float] = {}
        self._warned: dict[tuple[Key, int], int] = {}

    @property
    def is_on(self) -> bool:
        """Whether check() has to be called at all."""
        return self._warning_s > 0 or self._abort_s > 0

    def check(self, now_s: float, waiting: Sequence[Stall]) -> StallReport:
        """Return the report on all operations that wait now."""
        if not self.is_on or (not waiting and not self._since_s):
            return _NO_STALLS
        by_id = {(each.key, each.number): each for each in waiting}
        self._since_s = {stall_id: self._since_s.get(stall_id, now_s) for stall_id in by_id}
        self._warned = {stall_id: times for stall_id, times in self._warned.items() if stall_id in by_id}
        late: list[tuple[Stall, float]] = []
        expired: list[Key] = []
        for stall_id, since_s in self._since_s.items():
            waited_s = now_s - since_s
            if self._abort_s and waited_s >= self._abort_s:
                expired.append(by_id[stall_id].key)
            elif self._warning_s and (times := int(waited_s // self._warning_s)) > self._warned.get(stall_id, 0):
                self._warned[stall_id] = times
                late.append((by_id[stall_id], waited_s))
        return StallReport(_warnings(late), tuple(expired))


def _warnings(late: Sequence[tuple[Stall, float]]) -> tuple[str, ...]:
    """Return a sentence for each set of awaited ranks."""
    alike: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[Stall, float]]] = {}
    for each in late:
        alike.setdefault((each[0].submitted_by, each[0].missing), []).append(each)
    sentences = []
    for (submitted_by, missing), those in alike.items():
        names = [operation_in_words(each.key) for each, _ in those[:_LISTED_STALLS]]
        more = f" and {len(those) - _LISTED_STALLS} more" if len(those) > _LISTED_STALLS else ""
        longest_s = max(waited_s for _, waited_s in those)
        sentences.append(
            f"stalled for {longest_s:.0f} s: {', '.join(names)}{more}: {ranks_in_words(submitted_by)} submitted it, "
            f"still missing: {ranks_in_words(missing)}. Every rank has to submit every operation; look for a branch "
            f"that only some ranks take, or for a rank that is stuck"
        )
    return tuple(sentences)
