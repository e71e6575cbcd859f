"""The request of one rank for one operation, and the decisions of a round of negotiation. Pure.

Every rank receives every rank's payload in each round and decides alike (negotiation.py); no rank decides for others.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

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


class Request(msgspec.Struct, frozen=True, array_like=True):
    """The part of one rank in one operation.

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


class RoundPayload(msgspec.Struct, frozen=True, array_like=True):
    """The payload of one rank in one round.

    Attributes:
        requests: New, or different from the last agreed request of the same key.
        repeated: Places in the cache of requests that equal this rank's last one.
        expired: Keys of operations that this rank wants to give up (stalled for too long).
    """

    requests: tuple[Request, ...] = ()
    repeated: tuple[int, ...] = ()
    expired: tuple[Key, ...] = ()


@dataclass(frozen=True)
class Agreed:
    """An operation that can be executed now.

    `parts` are the members' requests, by rank within the process set; None for one that has joined.
    """

    key: Key
    ranks: tuple[int, ...]
    parts: tuple[Request | None, ...]

    @property
    def any_part(self) -> Request:
        """The request of the first member that has one: dtype, op, scales and root are the same in all."""
        return next(part for part in self.parts if part is not None)


@dataclass(frozen=True)
class Execute:
    """Execute these together: one operation, or several allreduces that one flat buffer holds."""

    operations: tuple[Agreed, ...]


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
    key: Key
    process_set: int


Decision: TypeAlias = Execute | Fail | AllJoined | SetAdded | SetRemoved
"""Executed by every rank in the order given."""
