"""One operation, and one group of them, that some rank has submitted. Pure; outstanding.py keeps them."""

from __future__ import annotations

from typing import TypeAlias

from farandole.collectives.named.fusion import Matched
from farandole.collectives.named.operation_requests import Key, Request
from farandole.collectives.named.process_set_members import Members

Label: TypeAlias = tuple[int, str]
"""A process set, and the name of a group or of an operation."""


class Pending:
    """One operation.

    parts      requests of the members, by place; None where there is none yet
    missing    how many members have neither submitted it nor joined
    matched    what was agreed on before, if all so far repeat just that
    group      of the first who submitted it; None before
    is_mixed   whether not all named the same group
    strangers  ranks that submitted it and are not in the process set
    number     operations are counted in the order in which the first rank submitted them
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
    """Operations that at least one rank wants to be carried out together.

    submitted      how many of its operations each rank has submitted
    sizes     how many each rank says that there are
    is_mixed  whether some rank submitted one of its operations outside it
    bare      what the user called it
    """

    __slots__ = ("bare", "is_mixed", "label", "members", "pendings", "sizes", "submitted")

    def __init__(self, label: Label, members: Members, bare: Label | None) -> None:
        self.label, self.members, self.bare = label, members, bare
        self.pendings: dict[Key, Pending] = {}
        self.submitted: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.is_mixed = False

    def is_whole_from(self, rank: int) -> bool:
        """Whether this rank has submitted all of it."""
        return self.submitted.get(rank, 0) >= self.sizes.get(rank, 1)

    def is_whole(self) -> bool:
        """Whether every member that has not joined has submitted all of it."""
        return all(map(self.is_whole_from, self.members.active()))

    def is_alike(self) -> bool:
        """Whether all submitted the same operations, once it is whole."""
        count = len(self.pendings)
        return (
            not self.is_mixed
            and all(size == count for size in self.sizes.values())
            and all(not pending.missing for pending in self.pendings.values())
        )
