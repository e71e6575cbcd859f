"""Check that all members' requests for one operation agree, and build the errors of those that do not. Pure.

negotiation.py calls it once every member has requested the operation, so that all of them get the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from farandole.collectives.named.stages import CPU, Fail, Key, Kind, PendingOperation, Request
from farandole.collectives.transport import Reduction

RankedRequests: TypeAlias = Sequence[tuple[int, Request]]
"""Global ranks and their requests, in the order of the ranks."""

_JOINABLE = {Kind.ALLREDUCE, Kind.BARRIER}  # a rank without data can only add zeros, and wait


def why_invalid(key: Key, ranks: tuple[int, ...], requests: Sequence[Request | None]) -> str | None:
    """Return an error message with ranks and values, equal on all members; None if the operation can be executed.

    `ranks` are the members of the process set; `requests` are theirs, in the same order; None for a member that has
    joined.
    """
    present = [(rank, request) for rank, request in zip(ranks, requests, strict=True) if request is not None]
    if key.kind not in _JOINABLE and len(present) < len(ranks):
        missing = [rank for rank, request in zip(ranks, requests, strict=True) if request is None]
        has = "has" if len(missing) == 1 else "have"
        problem: str | None = f"{ranks_in_words(missing)} {has} called join(); only allreduce and barrier work then"
    else:
        problem = next((found for check in _CHECKS[key.kind] if (found := check(present, ranks))), None)
    return None if problem is None else f"{operation_in_words(key)}: {problem}"


def _dtypes(requests: RankedRequests, _: tuple[int, ...]) -> str | None:
    return _difference(requests, "the dtype", lambda request: request.dtype)


def _devices(requests: RankedRequests, _: tuple[int, ...]) -> str | None:
    return _difference(requests, "the device", lambda request: "CPU" if request.device == CPU else "CUDA")


def _shapes(requests: RankedRequests, _: tuple[int, ...]) -> str | None:
    return _difference(requests, "the shape", lambda request: request.shape, _list)


def _rows(requests: RankedRequests, _: tuple[int, ...]) -> str | None:
    """Check the first dimension, which every tensor must have and which may differ; the others may not."""
    return _scalars(requests, _) or _difference(
        requests, "the shape of one row (all dimensions but the first)", lambda request: request.shape[1:], _list
    )


def _scalars(requests: RankedRequests, _: tuple[int, ...]) -> str | None:
    scalars = [rank for rank, request in requests if not request.shape]
    if not scalars:
        return None
    return f"the tensor of {ranks_in_words(scalars)} is a scalar; it needs at least one dimension"


def _ops(requests: RankedRequests, _: tuple[int, ...]) -> str | None:
    return _difference(requests, "the reduction", lambda request: request.op, _op)


def _scales(requests: RankedRequests, _: tuple[int, ...]) -> str | None:
    return _difference(requests, "the prescale factor", lambda request: request.prescale) or _difference(
        requests, "the postscale factor", lambda request: request.postscale
    )


def _roots(requests: RankedRequests, ranks: tuple[int, ...]) -> str | None:
    found = _difference(requests, "the root rank", lambda request: request.root)
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


def _sets(requests: RankedRequests, _: tuple[int, ...]) -> str | None:
    return _difference(requests, "the ranks of the process set", lambda request: request.ranks, _list)


Check: TypeAlias = Callable[[RankedRequests, tuple[int, ...]], str | None]

_CHECKS: dict[Kind, tuple[Check, ...]] = {
    Kind.ALLREDUCE: (_dtypes, _shapes, _ops, _scales, _devices),
    Kind.ALLGATHER: (_dtypes, _rows, _devices),
    Kind.BROADCAST: (_roots, _dtypes, _shapes, _devices),
    Kind.ALLTOALL: (_dtypes, _rows, _splits, _devices),
    # Summed before it is scattered: the first dimension is compared too.
    Kind.REDUCESCATTER: (_dtypes, _scalars, _shapes, _ops, _scales, _devices),
    Kind.BARRIER: (),
    Kind.ADD_PROCESS_SET: (_sets,),
    Kind.REMOVE_PROCESS_SET: (_sets,),
}


def _difference(
    requests: RankedRequests, what: str, value: Callable[[Request], object], text: Callable[[object], str] = str
) -> str | None:
    first = value(requests[0][1])
    if all(value(request) == first for _, request in requests):
        return None
    values = values_by_rank((rank, text(value(request))) for rank, request in requests)
    return None if values is None else f"ranks disagree on {what}: {values}"  # None where all values are nan


def _list(numbers: object) -> str:
    assert isinstance(numbers, tuple)
    return str(list(numbers))


def _op(number: object) -> str:
    return next((each.name.capitalize() for each in Reduction if each == number), str(number))


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
    """Return "ranks 0 and 2 have float32, rank 1 has int64", or None where all values are equal.

    `values` are those of each rank, in the order of the ranks; `verb` replaces "has" and "have".
    """
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
