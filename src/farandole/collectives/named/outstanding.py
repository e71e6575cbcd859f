"""Operations that some rank has submitted and that are not decided yet. Pure; negotiation.py decides them.

An ungrouped operation is complete when all members that have not joined have submitted it. A group is decided as a
whole: every member has to have submitted all operations that it assigns to the group. Where ranks disagree on the
members of a group, or on the operation that a name stands for, all operations involved form one cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias, TypeVar

from farandole.collectives.named.fusion import Matched
from farandole.collectives.named.operation_requests import Key, Kind, Request
from farandole.collectives.named.process_set_members import Members
from farandole.errors import ProtocolError

_PREFIXES = {
    kind: (f"grouped_{kind.name.lower()}.", f"{kind.name.lower()}.")
    for kind in (Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST, Kind.ALLTOALL, Kind.REDUCESCATTER)
}
_UNNAMED = "noname."  # each kind counts its unnamed operations: equal numbers of two kinds are unrelated


class Outstanding:
    """A table of all outstanding operations, equal on all ranks."""

    def __init__(self) -> None:
        self._by_key: dict[Key, Pending] = {}
        self._groups: dict[Label, OperationGroup] = {}
        self._by_name: dict[Label, list[Pending]] = {}  # by bare name, without operations of this round
        self._groups_by_name: dict[Label, list[OperationGroup]] = {}
        self._fresh: list[Pending] = []
        self._complete: list[Pending] = []
        self._touched: dict[Label, OperationGroup] = {}
        self._was_split = False  # a group has left: a cluster that it connected may be several now
        self._count = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def all(self) -> list[Pending]:
        return list(self._by_key.values())

    def get(self, key: Key) -> Pending | None:
        return self._by_key.get(key)

    def add(self, members: Members, rank: int, request: Request, matched: Matched | None) -> None:
        """Add an operation that a rank has submitted. `matched` is given if the request equals its last agreed one."""
        key = request.key
        pending = self._by_key.get(key)
        if pending is None:
            self._count += 1
            pending = self._by_key[key] = Pending(key, members, matched, self._count)
            self._fresh.append(pending)
        place = members.places.get(rank)
        if place is None:
            pending.strangers.append(rank)
            return
        parts = pending.parts
        if parts[place] is not None:
            raise ProtocolError(f"rank {rank} says {key.kind.name.lower()} {key.name!r} twice, before it was decided")
        parts[place] = request
        if matched is not pending.matched:
            pending.matched = None
        is_active = rank not in members.joined
        if is_active:
            pending.missing -= 1
        if request.group or pending.group:
            self._hear_group(pending, rank, request)
        else:
            pending.group = ""
            if is_active and not pending.missing:
                self._complete.append(pending)

    def join(self, members: Members, rank: int) -> None:
        """Mark that this member submits nothing more. Called after all operations of the same round were added."""
        place = members.places[rank]
        for pending in self._by_key.values():
            if pending.members is members and pending.parts[place] is None:
                pending.missing -= 1
                if not pending.missing and not pending.group and not pending.is_mixed:
                    self._complete.append(pending)
        self._touched.update((label, group) for label, group in self._groups.items() if group.members is members)

    def take_complete(self) -> list[Pending]:
        """Take the ungrouped operations that every member has submitted by now, in the order of their completion."""
        complete, self._complete = self._complete, []
        complete = [pending for pending in complete if not pending.is_mixed]
        for pending in complete:
            del self._by_key[pending.key]
        self._forget_names(complete)
        return complete

    def take_whole_groups(self) -> list[list[Pending]]:
        """Take the groups that every member has submitted with the same operations."""
        groups = [group for group in self._touched.values() if group.is_whole() and group.is_alike()]
        return [self.take(group.pendings.values()) for group in groups]

    def take_tangled(self) -> list[list[Pending]]:
        """Take the clusters that can never match: every member has submitted all of its operations, and they differ."""
        seeds = self._names_with_several_meanings()
        # A group that is not mixed, and has no such name in it, is a cluster of its own.
        is_simple = not seeds
        groups = self._groups if self._was_split else self._touched
        self._was_split = False
        for group in groups.values():
            if group.is_mixed or not is_simple or group.is_whole():
                seeds.append(list(group.pendings.values()))
        self._touched = {label: group for label, group in self._touched.items() if group.is_mixed}
        clusters = []
        for seed in seeds:
            still = [pending for pending in seed if self._by_key.get(pending.key) is pending]
            cluster = self.cluster(still)
            if cluster and self._is_hopeless(cluster):
                clusters.append(self.take(cluster))
        return clusters

    def cluster(self, seeds: Iterable[Pending], by_name: bool = True) -> list[Pending]:
        """Return these and all operations that depend on them: by groups, and by names with several meanings."""
        found: dict[Key, Pending] = {}
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
                todo += [each for each in group.pendings.values() if each.key not in found]
        return sorted(found.values(), key=lambda pending: pending.number)

    def take(self, pendings: Iterable[Pending]) -> list[Pending]:
        """Remove decided operations."""
        taken = sorted(pendings, key=lambda pending: pending.number)
        for pending in taken:
            del self._by_key[pending.key]
            for group in self._groups_of(pending):
                del group.pendings[pending.key]
                if not group.pendings:
                    del self._groups[group.label]
                    self._touched.pop(group.label, None)
                    _drop(self._groups_by_name, group.bare, group)
                    self._was_split = True
        self._forget_names(taken)
        return taken

    def awaited(self, pending: Pending) -> list[int]:
        """Return the members that have not submitted this operation; if all have, those that lack a part of the
        cluster."""
        return self.all_awaited([pending])[0]

    def all_awaited(self, pendings: Sequence[Pending]) -> list[list[int]]:
        """Return awaited() for each of these."""
        of_cluster: dict[Key, list[int]] = {}
        found = []
        for pending in pendings:
            missing = pending.missing_ranks() or of_cluster.get(pending.key)
            if missing is None:
                cluster = self.cluster([pending])
                missing = [rank for rank in pending.members.active() if not self._is_through(rank, cluster)]
                of_cluster.update((each.key, missing) for each in cluster)
            found.append(missing)
        return found

    # Inside ------------------------------------------------------------------------------------------------

    def _hear_group(self, pending: Pending, rank: int, request: Request) -> None:
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
            group.pendings[pending.key] = pending
            group.submitted[rank] = group.submitted.get(rank, 0) + 1
            group.sizes[rank] = max(group.sizes.get(rank, 1), request.group_size)
            self._touched[label] = group
        if pending.is_mixed:
            for group in self._groups_of(pending):
                group.is_mixed = True
                self._touched[group.label] = group

    def _groups_of(self, pending: Pending) -> list[OperationGroup]:
        if not pending.group and not pending.is_mixed:
            return []
        number = pending.key.process_set
        names = {part.group: None for part in pending.parts if part is not None and part.group}
        return [group for name in names if (group := self._groups.get((number, name))) is not None]

    def _names_with_several_meanings(self) -> list[list[Pending]]:
        """Return operations of several kinds to which the user gave one name.

        An operation counts from the end of its first round on: most are decided by then, and cost nothing.
        """
        for pending in self._fresh:
            if self._by_key.get(pending.key) is pending and (bare := _bare(pending.key, pending.key.name)):
                self._by_name.setdefault(bare, []).append(pending)
        self._fresh = []
        groups = self._groups_by_name
        found = [alike for bare, alike in self._by_name.items() if len(alike) > 1 or bare in groups]
        return found + [list(alike[0].pendings.values()) for alike in groups.values() if len(alike) > 1]

    def _is_hopeless(self, cluster: Sequence[Pending]) -> bool:
        return all(self._is_through(rank, cluster) for rank in cluster[0].members.active())

    def _is_through(self, rank: int, cluster: Sequence[Pending]) -> bool:
        """Return whether this member has submitted a part of the cluster, and all of the groups that it began."""
        place = cluster[0].members.places[rank]
        mine = [pending for pending in cluster if pending.parts[place] is not None]
        groups = {group.label: group for pending in mine for group in self._groups_of(pending)}
        return bool(mine) and all(group.is_whole_from(rank) for group in groups.values() if rank in group.submitted)

    def _forget_names(self, decided: Sequence[Pending]) -> None:
        if self._by_name:
            for pending in decided:
                _drop(self._by_name, _bare(pending.key, pending.key.name), pending)


def _bare(key: Key, name: str) -> Label | None:
    """Return the user's name for an operation of this key, or for its group, without the kind of operation.

    Ranks that mean the same use the same name. None where the user gave no name.
    """
    prefixes = _PREFIXES.get(key.kind)
    if prefixes is None:
        return None
    bare = name.removeprefix(prefixes[0]).removeprefix(prefixes[1])
    return None if bare.startswith(_UNNAMED) else (key.process_set, bare)


T = TypeVar("T")


def _drop(table: dict[Label, list[T]], bare: Label | None, value: T) -> None:
    alike = None if bare is None else table.get(bare)
    if bare is not None and alike is not None and value in alike:
        alike.remove(value)
        if not alike:
            del table[bare]


# One operation, and one group of operations ---------------------------------------------------------------------------

Label: TypeAlias = tuple[int, str]
"""A process set, and the name of a group or of an operation."""


class Pending:
    """An operation that some rank has submitted.

    Attributes:
        parts: Requests of the members, by place; None where there is none yet.
        missing: The number of members that have neither submitted it nor joined.
        matched: The earlier agreement, if all requests so far repeat it.
        group: The group named by the first rank that submitted it; None before.
        is_mixed: Whether some named another group.
        strangers: Ranks that submitted it and are not in the process set.
        number: Operations are counted in the order in which the first rank submitted them.
    """

    __slots__ = ("group", "is_mixed", "key", "matched", "members", "missing", "number", "parts", "strangers")

    def __init__(self, key: Key, members: Members, matched: Matched | None, number: int) -> None:
        self.key, self.members, self.matched, self.number = key, members, matched, number
        self.parts: list[Request | None] = [None] * len(members.ranks)
        self.missing = len(members.ranks) - len(members.joined)
        self.group: str | None = None
        self.is_mixed = False
        self.strangers: list[int] = []

    def submitted_by(self) -> list[int]:
        members = [rank for rank, part in zip(self.members.ranks, self.parts, strict=True) if part is not None]
        return sorted(members + self.strangers)

    def missing_ranks(self) -> list[int]:
        return [rank for rank in self.members.active() if self.parts[self.members.places[rank]] is None]


class OperationGroup:
    """Operations that at least one rank wants to be executed together.

    Attributes:
        submitted: The number of its operations that each rank has submitted.
        sizes: The number of operations that each rank declares.
        is_mixed: Whether some rank submitted one of its operations outside of it.
        bare: The user's name for it.
    """

    __slots__ = ("bare", "is_mixed", "label", "members", "pendings", "sizes", "submitted")

    def __init__(self, label: Label, members: Members, bare: Label | None) -> None:
        self.label, self.members, self.bare = label, members, bare
        self.pendings: dict[Key, Pending] = {}
        self.submitted: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.is_mixed = False

    def is_whole_from(self, rank: int) -> bool:
        """Return whether this rank has submitted all of it."""
        return self.submitted.get(rank, 0) >= self.sizes.get(rank, 1)

    def is_whole(self) -> bool:
        """Return whether every member that has not joined has submitted all of it."""
        return all(map(self.is_whole_from, self.members.active()))

    def is_alike(self) -> bool:
        """Return whether all members submitted the same operations, once it is whole."""
        count = len(self.pendings)
        return (
            not self.is_mixed
            and all(size == count for size in self.sizes.values())
            and all(not pending.missing for pending in self.pendings.values())
        )
