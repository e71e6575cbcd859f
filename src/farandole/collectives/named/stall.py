"""Decide when to warn of an operation that waits for ranks, and when to give it up. Pure; engine.py asks.

Usually some rank takes another path through the script, and will never submit it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from farandole.collectives.named.negotiation import UnmatchedOperation
from farandole.collectives.named.operation_requests import Key
from farandole.collectives.named.validation import ranks_in_words

_LISTED = 5  # the number of operations that a warning names for one set of awaited ranks


@dataclass(frozen=True)
class StallReport:
    """The result of one check of the waiting operations.

    Attributes:
        warnings: Sentences for the log: the same on all ranks, so that one of them is enough to log them.
        expired: Operations that have waited for too long; to be sent in the next round.
    """

    warnings: tuple[str, ...] = ()
    expired: tuple[Key, ...] = ()


_NOTHING = StallReport()


class StallWatch:
    """Checks the waiting operations periodically; the resolution of its times is the interval of the checks.

    Args:
        warning_s: Warn of an operation that has waited for this time, in seconds, and again after each such time; 0 for
            never.
        abort_s: An operation that has waited for this time, in seconds, has expired; 0 for never.
    """

    def __init__(self, warning_s: float = 60.0, abort_s: float = 0.0) -> None:
        if warning_s < 0 or abort_s < 0:
            raise ValueError(f"stall times must not be negative, got warning_s={warning_s}, abort_s={abort_s}")
        self._warning_s, self._abort_s = warning_s, abort_s
        self._since_s: dict[tuple[Key, int], float] = {}
        self._warned: dict[tuple[Key, int], int] = {}

    @property
    def is_on(self) -> bool:
        """True when check() has to be called at all."""
        return self._warning_s > 0 or self._abort_s > 0

    def check(self, now_s: float, waiting: Sequence[UnmatchedOperation]) -> StallReport:
        """Return the report on all operations that wait now."""
        if not self.is_on or (not waiting and not self._since_s):
            return _NOTHING
        by_id = {(each.key, each.number): each for each in waiting}
        self._since_s = {which: self._since_s.get(which, now_s) for which in by_id}
        self._warned = {which: times for which, times in self._warned.items() if which in by_id}
        late: list[tuple[UnmatchedOperation, float]] = []
        expired: list[Key] = []
        for which, since_s in self._since_s.items():
            waited_s = now_s - since_s
            if self._abort_s and waited_s >= self._abort_s:
                expired.append(by_id[which].key)
            elif self._warning_s and (times := int(waited_s // self._warning_s)) > self._warned.get(which, 0):
                self._warned[which] = times
                late.append((by_id[which], waited_s))
        return StallReport(_warnings(late), tuple(expired))


def _warnings(late: Sequence[tuple[UnmatchedOperation, float]]) -> tuple[str, ...]:
    """Return a sentence for each set of awaited ranks."""
    alike: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[UnmatchedOperation, float]]] = {}
    for each in late:
        alike.setdefault((each[0].submitted_by, each[0].missing), []).append(each)
    sentences = []
    for (submitted_by, missing), those in alike.items():
        names = [f"{each.key.kind.name.lower()} {each.key.name!r}" for each, _ in those[:_LISTED]]
        more = f" and {len(those) - _LISTED} more" if len(those) > _LISTED else ""
        longest_s = max(waited_s for _, waited_s in those)
        sentences.append(
            f"stalled for {longest_s:.0f} s: {', '.join(names)}{more}: {ranks_in_words(submitted_by)} submitted it, "
            f"still missing: {ranks_in_words(missing)}. Every rank has to submit every operation; look for a branch "
            f"that only some ranks take, or for a rank that is stuck"
        )
    return tuple(sentences)
