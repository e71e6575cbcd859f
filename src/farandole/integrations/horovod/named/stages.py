"""The stages of a named operation between its submission and its execution, a type for each, and the
validation of its requests. Pure.

They are a Request, a PendingOperation, a MatchedOperation and a Response; the picture is in __init__.py. negotiation.py
takes an operation from one stage to the next.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from farandole.training.collectives.agreement import LEAVE_TOGETHER
from farandole.training.collectives.transport import Reduction

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
    END = 10


class Key(msgspec.Struct, frozen=True, array_like=True):
    """The key by which operations are matched."""

    process_set: int
    kind: Kind
    name: str


END = Key(GLOBAL_SET, Kind.END, "elastic function")
"""A rank requests it when its elastic function has returned; it submits nothing more before all have requested it."""


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

_BITS = re.compile(r"\d+")


def _item_bytes(dtype: str) -> int:
    """Return the size of a number, by the bits that its dtype has in its name; a bool has 1 byte."""
    bits = _BITS.search(dtype)
    return int(bits[0]) // 8 if bits else 1


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
        self.nbytes = math.prod(request.shape) * _item_bytes(request.dtype)
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


# Check that all members' requests for one operation agree, and build the errors of those that do not.
#
# negotiation.py calls it once every member has requested the operation, so that all of them get the same answer.


RankedRequests: TypeAlias = Sequence[tuple[int, Request]]
"""Global ranks and their requests, in the order of the ranks."""

_JOINABLE = {Kind.ALLREDUCE, Kind.BARRIER}  # a rank without data can only add zeros, and wait


def why_invalid(key: Key, ranks: tuple[int, ...], requests: Sequence[Request | None]) -> str | None:
    """Return an error message with ranks and values, equal on all members; None if the operation can be executed.
    `ranks` are the members of the process set; `requests` are theirs, in the same order; None for a member that has
    joined."""
    present = [(rank, request) for rank, request in zip(ranks, requests, strict=True) if request is not None]
    if key.kind not in _JOINABLE and len(present) < len(ranks):
        missing = [rank for rank, request in zip(ranks, requests, strict=True) if request is None]
        has = "has" if len(missing) == 1 else "have"
        problem: str | None = f"{ranks_in_words(missing)} {has} called join(); only allreduce and barrier work then"
    else:
        problem = next((found for check in _CHECKS[key.kind] if (found := check(present, ranks))), None)
    return None if problem is None else f"{operation_in_words(key)}: {problem}"


Check: TypeAlias = Callable[[RankedRequests, tuple[int, ...]], str | None]


def _equal(what: str, value: Callable[[Request], object], text: Callable[[object], str] = str) -> Check:
    """Return the check that all ranks have the same value."""

    def check(requests: RankedRequests, _: tuple[int, ...]) -> str | None:
        first = value(requests[0][1])
        if all(value(request) == first for _, request in requests):
            return None
        values = values_by_rank((rank, text(value(request))) for rank, request in requests)
        return None if values is None else f"ranks disagree on {what}: {values}"  # None where all values are nan

    return check


def _list(numbers: object) -> str:
    assert isinstance(numbers, tuple)
    return str(list(numbers))


def _op(number: object) -> str:
    return next((each.name.capitalize() for each in Reduction if each == number), str(number))


_equal_roots = _equal("the root rank", lambda request: request.root)


def _scalars(requests: RankedRequests, _: tuple[int, ...]) -> str | None:
    scalars = [rank for rank, request in requests if not request.shape]
    if not scalars:
        return None
    return f"the tensor of {ranks_in_words(scalars)} is a scalar; it needs at least one dimension"


def _roots(requests: RankedRequests, ranks: tuple[int, ...]) -> str | None:
    found = _equal_roots(requests, ranks)
    if found is None and requests[0][1].root not in ranks:
        return f"root rank {requests[0][1].root} is not in the process set, which has {ranks_in_words(ranks)}"
    return found


def _splits(requests: RankedRequests, ranks: tuple[int, ...]) -> str | None:
    for rank, request in requests:
        rows, splits = request.shape[0], request.splits
        if not splits and rows % len(ranks):
            return f"rank {rank} has {rows} rows, which cannot be divided evenly among {len(ranks)} ranks"
        if splits and (len(splits) != len(ranks) or min(splits) < 0 or sum(splits) > rows):
            return (
                f"rank {rank} has splits {list(splits)}; needed are {len(ranks)} counts that add up to at most its "
                f"{rows} rows"
            )
    return None


_dtypes = _equal("the dtype", lambda request: request.dtype)
_devices = _equal("the device", lambda request: "CPU" if request.device == CPU else "CUDA")
_shapes = _equal("the shape", lambda request: request.shape, _list)
_rows = _equal("the shape of one row (all dimensions but the first)", lambda request: request.shape[1:], _list)
_reductions = (
    _equal("the reduction", lambda request: request.op, _op),
    _equal("the prescale factor", lambda request: request.prescale),
    _equal("the postscale factor", lambda request: request.postscale),
)
_sets = _equal("the ranks of the process set", lambda request: request.ranks, _list)

_CHECKS: dict[Kind, tuple[Check, ...]] = {
    Kind.ALLREDUCE: (_dtypes, _shapes, *_reductions, _devices),
    Kind.ALLGATHER: (_dtypes, _scalars, _rows, _devices),
    Kind.BROADCAST: (_roots, _dtypes, _shapes, _devices),
    Kind.ALLTOALL: (_dtypes, _scalars, _rows, _splits, _devices),
    # Summed before it is scattered: the first dimension is compared too.
    Kind.REDUCESCATTER: (_dtypes, _scalars, _shapes, *_reductions, _devices),
    Kind.BARRIER: (),
    Kind.END: (),
    Kind.ADD_PROCESS_SET: (_sets,),
    Kind.REMOVE_PROCESS_SET: (_sets,),
}


# Errors of operations that depend on each other, for each rank that submitted one of them -----------------------------

_MOST_LISTED = 3  # of one rank's operations


def fail_group(group: Sequence[PendingOperation], bad: Sequence[Fail]) -> list[Fail]:
    """Fail all operations of a group because of some, which have their own message."""
    messages = {fail.key: fail.message for fail in bad}
    why = f"another operation of its group {group[0].group!r} failed: {bad[0].message}"
    return [Fail(each.key, messages.get(each.key) or f"{operation_in_words(each.key)}: {why}") for each in group]


def fail_contradictory(cluster: Sequence[PendingOperation]) -> list[Fail]:
    """Fail all operations of a cluster; the message lists each rank's operations."""
    by_rank: dict[int, list[str]] = {}
    for pending in cluster:
        for rank, request in zip(pending.members.ranks, pending.requests, strict=True):
            if request is not None:
                group = f" of group {request.group!r} with {request.group_size}" if request.group else ""
                by_rank.setdefault(rank, []).append(operation_in_words(pending.key) + group)
    found = values_by_rank(((rank, _shortened(by_rank[rank])) for rank in sorted(by_rank)), verb="submitted")
    message = f"ranks disagree on a name or a group: {found or 'all submitted only a part of the group'}"
    return [Fail(pending.key, message) for pending in cluster]


def fail_outsiders(pending: PendingOperation) -> Fail:
    """Fail an operation that ranks outside of its process set have submitted."""
    members, outsiders = ranks_in_words(pending.members.ranks), ranks_in_words(pending.outsiders)
    problem = f"{outsiders} submitted it, but process set {pending.members.number} has {members}"
    return Fail(pending.key, f"{operation_in_words(pending.key)}: {problem}")


def fail_expired(pending: PendingOperation, awaited: Sequence[int], together: Sequence[PendingOperation]) -> list[Fail]:
    """Fail an operation that has waited for these ranks for too long, and all operations that belong to it."""
    submitted_by, missing = ranks_in_words(pending.requested_by()), ranks_in_words(awaited)
    what = f"{operation_in_words(pending.key)} was given up after waiting for too long"
    message = f"{what}: {submitted_by} submitted it, {missing} did not"
    return [Fail(each.key, message) for each in together]


def fail_after_end(ended: Sequence[int], pending: PendingOperation, together: Sequence[PendingOperation]) -> list[Fail]:
    """Fail an operation that waits for ranks that have left the elastic function, all operations that belong to it, and
    the end itself."""
    has = "has" if len(ended) == 1 else "have"
    message = (
        f"{ranks_in_words(ended)} {has} left the elastic function, and {operation_in_words(pending.key)} of "
        f"{ranks_in_words(pending.requested_by())} waits for {'it' if len(ended) == 1 else 'them'}: {LEAVE_TOGETHER}"
    )
    return [Fail(each.key, message) for each in together]


def _shortened(names: list[str]) -> str:
    more = [f"{len(names) - _MOST_LISTED} more"] if len(names) > _MOST_LISTED else []
    return " and ".join(names[:_MOST_LISTED] + more)


# Ranks and their values, as text for messages -------------------------------------------------------------------------

_SHOWN = 8  # In a large world a message lists only the first entries.


def operation_in_words(key: Key) -> str:
    """Return an operation as "allreduce 'x'"."""
    return f"{key.kind.name.lower()} {key.name!r}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ranks as "rank 3", "ranks 0 and 2" or "ranks 0, 1, 2, ... (1000 in all)"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _SHOWN:
        return f"ranks {', '.join(map(str, ranks[:_SHOWN]))}, ... ({len(ranks)} in all)"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}" if ranks else "no rank"


def values_by_rank(values: Iterable[tuple[int, str]], verb: str | None = None) -> str | None:
    """Return "ranks 0 and 2 have float32, rank 1 has int64", or None where all values are equal. `values` are those of
    each rank, in the order of the ranks; `verb` replaces "has" and "have"."""
    by_value: dict[str, list[int]] = {}
    for rank, value in values:
        by_value.setdefault(value, []).append(rank)
    if len(by_value) < 2:
        return None
    clauses = [
        f"{ranks_in_words(ranks)} {verb or ('has' if len(ranks) == 1 else 'have')} {value}"
        for value, ranks in by_value.items()
    ]
    hidden = len(clauses) - _SHOWN
    return ", ".join(clauses[:_SHOWN]) + (f", and {hidden} more differ" if hidden > 0 else "")
