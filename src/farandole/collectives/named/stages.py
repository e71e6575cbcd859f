"""The stages of a named operation between its submission and its execution, a type for each. Pure.

They are a Request, a PendingOperation, a MatchedOperation and a Response; the picture is in __init__.py. negotiation.py
takes an operation from one stage to the next.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from farandole.collectives.transport import Reduction

CPU = -1
"""The `device` of a tensor in main memory; otherwise the CUDA device's number."""

GLOBAL_SET = 0
"""The process set of all ranks."""


class Kind(enum.IntEnum):
    """The kinds of operations. The numbers are on the wire."""

    ALLREDUCE = 1
    ALLGATHER = 2
    BROADCAST = 3
    ALLTOALL = 4
    REDUCESCATTER = 5
    BARRIER = 6
    JOIN = 7
    ADD_PROCESS_SET = 8
    REMOVE_PROCESS_SET = 9


class Key(msgspec.Struct, frozen=True, array_like=True):
    """The key by which operations are matched."""

    process_set: int
    kind: Kind
    name: str


# Requested ------------------------------------------------------------------------------------------------------------


class Request(msgspec.Struct, frozen=True, array_like=True):
    """The part of one rank in one operation, without its tensor: what the other ranks have to know.

    Attributes:
        dtype: The name, as "float32"; "" where there is no tensor.
        shape: The shape of this rank's tensor.
        op: A Reduction, where tensors are reduced.
        root: A global rank, for a broadcast.
        splits: The rows for each member of the process set, for an alltoall.
        group: Operations of one group are executed together or not at all; "" for none.
        ranks: Those of the process set to be added or removed (sorted, global).
    """

    key: Key
    dtype: str = ""
    shape: tuple[int, ...] = ()
    op: int = 1
    root: int = 0
    prescale: float = 1.0
    postscale: float = 1.0
    device: int = CPU
    splits: tuple[int, ...] = ()
    group: str = ""
    group_size: int = 0
    ranks: tuple[int, ...] = ()


class RequestList(msgspec.Struct, frozen=True, array_like=True):
    """The requests that one rank sends in one round.

    Attributes:
        requests: Those that are new, or differ from the cached request of the same key.
        repeated: Places in the response cache, for requests that equal this rank's cached ones.
        expired: Keys of operations that this rank wants to give up (stalled for too long).
    """

    requests: tuple[Request, ...] = ()
    repeated: tuple[int, ...] = ()
    expired: tuple[Key, ...] = ()


# Pending: requested by some of the members ----------------------------------------------------------------------------


class Members:
    """The members of one process set.

    Attributes:
        ranks: Global, sorted.
        places: The place in the set of each global rank.
        joined: The members that have joined, with their keys, in the order in which they did.
    """

    __slots__ = ("joined", "number", "places", "ranks")

    def __init__(self, number: int, ranks: tuple[int, ...]) -> None:
        self.number, self.ranks = number, ranks
        self.places = {rank: place for place, rank in enumerate(ranks)}
        self.joined: dict[int, Key] = {}

    def active(self) -> list[int]:
        """Return the members that have not joined."""
        return [rank for rank in self.ranks if rank not in self.joined]


class PendingOperation:
    """An operation that some rank has requested.

    Attributes:
        requests: Those of the members, by place; None where there is none yet.
        missing: The number of members that have neither requested it nor joined.
        cached: The cached operation that all requests so far repeat; None if there is none, or one differs from it.
        group: The group named by the first rank that requested it; None before.
        is_mixed: Whether some rank named another group.
        outsiders: Ranks that requested it and are not in the process set.
        number: Operations are counted in the order in which the first rank requested them.
    """

    __slots__ = ("cached", "group", "is_mixed", "key", "members", "missing", "number", "outsiders", "requests")

    def __init__(self, key: Key, members: Members, cached: MatchedOperation | None, number: int) -> None:
        self.key, self.members, self.cached, self.number = key, members, cached, number
        self.requests: list[Request | None] = [None] * len(members.ranks)
        self.missing = len(members.ranks) - len(members.joined)
        self.group: str | None = None
        self.is_mixed = False
        self.outsiders: list[int] = []

    def requested_by(self) -> list[int]:
        """Return the global ranks that have requested it."""
        members = [rank for rank, request in zip(self.members.ranks, self.requests, strict=True) if request is not None]
        return sorted(members + self.outsiders)

    def missing_ranks(self) -> list[int]:
        """Return the global ranks of the members that have neither requested it nor joined."""
        return [rank for rank in self.members.active() if self.requests[self.members.places[rank]] is None]


# Matched: requested by all members, and their requests agree ----------------------------------------------------------

# Only for comparing a buffer with its limit; an estimate is good enough for a dtype that is not listed.
_ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "complex128": 16,
}
_OTHER_ITEM_BYTES = 8


@dataclass(slots=True)
class MatchedOperation:
    """An operation that can be executed, now and again when all members repeat their requests.

    Attributes:
        members: Those of the operation's process set.
        requests: Those of the members, by place; None for a member that has joined.
        any_request: The request of the first member that has one: dtype, op, scales and root are the same in all.
        nbytes: The size of one rank's tensor.
        fusion_key: Operations with equal fusion keys may share a buffer; None for an operation that is never fused.
    """

    key: Key
    members: Members = field(compare=False, repr=False)
    requests: tuple[Request | None, ...]
    any_request: Request = field(init=False, compare=False, repr=False)
    nbytes: int = field(init=False, compare=False, repr=False)
    fusion_key: tuple[object, ...] | None = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        request = self.any_request = next(each for each in self.requests if each is not None)
        self.nbytes = math.prod(request.shape) * _ITEM_BYTES.get(request.dtype, _OTHER_ITEM_BYTES)
        self.fusion_key = _fusion_key(self.key, request, self.requests)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the members."""
        return self.members.ranks

    def request_of(self, rank: int) -> Request | None:
        """Return the request of a global rank; None if it is not a member, or had joined."""
        place = self.members.places.get(rank)
        return None if place is None else self.requests[place]


def _fusion_key(key: Key, request: Request, requests: tuple[Request | None, ...]) -> tuple[object, ...] | None:
    if key.kind is not Kind.ALLREDUCE or request.op == Reduction.ADASUM:
        return None
    # For each rank, as a rank may have one tensor on its first device and another one on its second.
    devices = tuple([None if each is None else each.device for each in requests])
    return key.process_set, request.dtype, request.op, request.prescale, request.postscale, devices


# Decided --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Execute:
    """Execute these together: one operation, or several allreduces that one flat buffer holds."""

    operations: tuple[MatchedOperation, ...]


@dataclass(frozen=True)
class Fail:
    """The operation cannot be executed; every rank that submitted it gets this error."""

    key: Key
    message: str


@dataclass(frozen=True)
class AllJoined:
    """Every member has joined; `last_rank` (global) was the last to do so."""

    process_set: int
    last_rank: int


@dataclass(frozen=True)
class SetAdded:
    """All ranks agreed on a new process set."""

    key: Key
    process_set: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class SetRemoved:
    """All ranks agreed on the removal of a process set."""

    key: Key
    process_set: int


Response: TypeAlias = Execute | Fail | AllJoined | SetAdded | SetRemoved
"""A decision of a round. Every rank carries out all of them, in the order given."""
