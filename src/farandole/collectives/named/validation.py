"""Check that all members' requests for one operation agree: a check for each kind. Pure.

negotiation.py asks once every member has submitted the operation, so that all of them get the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from farandole.collectives.named.operation_requests import CPU, Key, Kind, Request
from farandole.collectives.transport import Reduction

Voices: TypeAlias = Sequence[tuple[int, Request]]
"""Global ranks and their requests, in the order of the ranks."""

_JOINABLE = {Kind.ALLREDUCE, Kind.BARRIER}  # a rank without data can only add zeros, and wait


def why_invalid(key: Key, ranks: tuple[int, ...], parts: Sequence[Request | None]) -> str | None:
    """Return a message with ranks and values, sent to all of them; None if the operation can be executed.

    `ranks` are the members of the process set; `parts` are their requests, in the same order; None for a member that
    has joined.
    """
    voices = [(rank, part) for rank, part in zip(ranks, parts, strict=True) if part is not None]
    what = key.kind.name.lower()
    if key.kind not in _JOINABLE and len(voices) < len(ranks):
        missing = [rank for rank, part in zip(ranks, parts, strict=True) if part is None]
        has = "has" if len(missing) == 1 else "have"
        problem: str | None = f"{ranks_in_words(missing)} {has} called join(); only allreduce and barrier work then"
    else:
        problem = next((found for check in _CHECKS[key.kind] if (found := check(voices, ranks))), None)
    return None if problem is None else f"{what} {key.name!r}: {problem}"


def _dtypes(voices: Voices, _: tuple[int, ...]) -> str | None:
    return _difference(voices, "the dtype", lambda part: part.dtype)


def _devices(voices: Voices, _: tuple[int, ...]) -> str | None:
    return _difference(voices, "the device", lambda part: "CPU" if part.device == CPU else "CUDA")


def _shapes(voices: Voices, _: tuple[int, ...]) -> str | None:
    return _difference(voices, "the shape", lambda part: part.shape, _list)


def _rows(voices: Voices, _: tuple[int, ...]) -> str | None:
    """Check the first dimension, which every tensor must have and which may differ; the others may not."""
    return _scalars(voices, _) or _difference(
        voices, "the shape of one row (all dimensions but the first)", lambda part: part.shape[1:], _list
    )


def _scalars(voices: Voices, _: tuple[int, ...]) -> str | None:
    scalars = [rank for rank, part in voices if not part.shape]
    if not scalars:
        return None
    return f"the tensor of {ranks_in_words(scalars)} is a scalar; it needs at least one dimension"


def _ops(voices: Voices, _: tuple[int, ...]) -> str | None:
    return _difference(voices, "the reduction", lambda part: part.op, _op)


def _scales(voices: Voices, _: tuple[int, ...]) -> str | None:
    return _difference(voices, "the prescale factor", lambda part: part.prescale) or _difference(
        voices, "the postscale factor", lambda part: part.postscale
    )


def _roots(voices: Voices, ranks: tuple[int, ...]) -> str | None:
    found = _difference(voices, "the root rank", lambda part: part.root)
    if found is None and voices[0][1].root not in ranks:
        return f"root rank {voices[0][1].root} is not in the process set, which has {ranks_in_words(ranks)}"
    return found


def _splits(voices: Voices, ranks: tuple[int, ...]) -> str | None:
    for rank, part in voices:
        rows = part.shape[0]
        if not part.splits and rows % len(ranks):
            return f"rank {rank} has {rows} rows, which cannot be dealt out evenly to {len(ranks)} ranks"
        if part.splits and (len(part.splits) != len(ranks) or min(part.splits) < 0 or sum(part.splits) > rows):
            return (
                f"rank {rank} has splits {list(part.splits)}; needed are {len(ranks)} counts that add up to at most "
                f"its {rows} rows"
            )
    return None


def _sets(voices: Voices, _: tuple[int, ...]) -> str | None:
    return _difference(voices, "the ranks of the process set", lambda part: part.ranks, _list)


Check: TypeAlias = Callable[[Voices, tuple[int, ...]], str | None]

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
    voices: Voices, what: str, value: Callable[[Request], object], text: Callable[[object], str] = str
) -> str | None:
    first = value(voices[0][1])
    if all(value(part) == first for _, part in voices):
        return None
    said = who_says_what((rank, text(value(part))) for rank, part in voices)
    return None if said is None else f"ranks disagree on {what}: {said}"  # None where all values are nan


def _list(numbers: object) -> str:
    assert isinstance(numbers, tuple)
    return str(list(numbers))


def _op(number: object) -> str:
    return next((each.name.capitalize() for each in Reduction if each == number), str(number))


# Ranks and their values, as text for messages -------------------------------------------------------------------------

_SHOWN = 8  # In a large world a message lists only the first entries.


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ranks as "rank 3", "ranks 0 and 2" or "ranks 0, 1, 2, ... (1000 in all)"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _SHOWN:
        return f"ranks {', '.join(map(str, ranks[:_SHOWN]))}, ... ({len(ranks)} in all)"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}" if ranks else "no rank"


def who_says_what(values: Iterable[tuple[int, str]]) -> str | None:
    """Return "ranks 0 and 2 say float32, rank 1 says int64", or None where all values are equal.

    `values` are those of each rank, in the order of the ranks.
    """
    by_value: dict[str, list[int]] = {}
    for rank, value in values:
        by_value.setdefault(value, []).append(rank)
    if len(by_value) < 2:
        return None
    clauses = [
        f"{ranks_in_words(ranks)} {'says' if len(ranks) == 1 else 'say'} {value}" for value, ranks in by_value.items()
    ]
    hidden = len(clauses) - _SHOWN
    return ", ".join(clauses[:_SHOWN]) + (f", and {hidden} more differ" if hidden > 0 else "")
