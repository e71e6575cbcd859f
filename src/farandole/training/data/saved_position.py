"""Whether a saved position of the training means the same samples here. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farandole.errors import DataError

# Values of entries that a saved state lacks.
_ABSENT: Mapping[str, int | str] = {"tail": "short"}
# Reasons, besides other arguments, for which a saved state may not fit.
_CHANGED: Mapping[str, str] = {
    "size": "; samples were added to the data set, or removed from it",
    "order": "; the last digits of an order are a hash of its weights, labels, lengths or shard sizes",
}
_NAMES = "version", "seed", "order", "size", "global_batch_size", "tail"


def written(identity: Mapping[str, int | str]) -> dict[str, int | str]:
    """Return the entries by which a saved state says what its cursor depends on, without those that may be absent."""
    return {name: value for name, value in identity.items() if _ABSENT.get(name) != value}


def refuse_another(ours: Mapping[str, int | str], saved: Mapping[str, Any]) -> None:
    """Raise DataError if the saved state has another data set size, order, tail or global batch size."""
    for name in _NAMES:
        theirs, mine = saved.get(name, _ABSENT.get(name)), ours.get(name, _ABSENT.get(name))
        if theirs != mine:
            raise DataError(
                f"the saved loader has {name}={theirs}, this one {mine}; use the values it was saved with, or do not "
                f"load it{_CHANGED.get(name, '')}"
            )


def shards_to_continue_with(ours: int, saved: int, is_default: bool) -> int:
    """Return the number of shards with which the training continues: the saved one, where this loader has no number
    of its own (`is_default`). 0: not strict. Raises DataError where both have one, and they differ."""
    if not ours or not saved or is_default:
        return saved if ours and saved else ours
    if ours != saved:
        raise DataError(
            f"the saved loader has {saved} shards, this one {ours}: the model would not be the same; leave shards "
            f"out, or use the number that it was saved with"
        )
    return ours
