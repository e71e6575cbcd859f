"""Describe ranks and their values: the messages of operations that ranks disagree on. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
