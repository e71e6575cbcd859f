"""What is wrong with the records of a job, in words: they are compared with each other, and with those of a job that
nothing happened to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.gallery.record import STATISTICS

TOLERANCE = 1e-10
Record = Mapping[str, Any]


def differences(one: Record, other: Record, tolerance: float, without: Sequence[str] = ()) -> Iterator[str]:
    """Each name at which two records differ. Names that begin or end with one of `without` are left out."""
    for name in sorted(one.keys() | other.keys()):
        if any(name.startswith(each) or name.endswith(each) for each in without):
            continue
        if name not in one or name not in other:
            yield f"{name} is only on one side"
        elif (off := _off(one[name], other[name])) > tolerance:
            yield f"{name}: {_short(one[name])} and {_short(other[name])}, off by {off:.3g}"


def unequal(records: Mapping[str, Record], without: Sequence[str] = ()) -> Iterator[str]:
    """Workers end with the same values, to the last bit."""
    names = sorted(records)
    for name in names[1:]:
        found = list(differences(records[names[0]], records[name], 0.0, without))
        if found:
            yield f"{names[0]} and {name} ended with different values: {_some(found)}"


def unlike(
    records: Mapping[str, Record], undisturbed: Record, without: Sequence[str] = (), tolerance: float = TOLERANCE
) -> Iterator[str]:
    """Workers end with the values of a job that nothing happened to; without a tolerance also in BatchNorm's
    statistics."""
    for name, record in sorted(records.items()):
        found = list(differences(record, undisturbed, tolerance, (*without, *(STATISTICS if tolerance else ()))))
        if found:
            yield f"{name} differs from the undisturbed job: {_some(found)}"
            return


def miscounted(records: Mapping[str, Record], expected: float, most_repeated: int = 0) -> Iterator[str]:
    """The witness says that each sample was trained in each epoch, once; of `most_repeated` samples more often."""
    for name, record in sorted(records.items()):
        seen = next(value for key, value in record.items() if key.split(".")[-1] == "seen")
        ratios = [value / expected for value in seen]
        wrong = {index: round(ratio, 4) for index, ratio in enumerate(ratios) if abs(ratio - 1) > 1e-9}
        if len(wrong) > most_repeated or any(ratio < 1 for ratio in wrong.values()):
            yield f"{name}: of what each sample adds in all epochs, these added: {_some(map(str, wrong.items()))}"
            return


def _off(one: Any, other: Any) -> float:
    if isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            return math.inf
        return max((_off(a, b) for a, b in zip(one, other, strict=True)), default=0.0)
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        if one == other or (math.isnan(one) and math.isnan(other)):
            return 0.0
        off = abs(one - other) / max(1.0, abs(one))
        return off if math.isfinite(off) else math.inf
    return 0.0 if one == other else math.inf


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _some(words: Any) -> str:
    words = list(words)
    return "; ".join(words[:4]) + (f"; and {len(words) - 4} more" if len(words) > 4 else "")
