"""An operation, and a group of operations, that some rank has submitted. Pure; outstanding.py keeps them."""

from __future__ import annotations

from typing import TypeAlias

from farandole.collectives.named.fusion import Matched
from farandole.collectives.named.operation_requests import Key, Request
from farandole.collectives.named.process_set_members import Members

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
