"""Operations that wait for ranks for too long: when to warn of them, and when to give them up. Pure; engine.py asks.

Usually it means that some rank takes another way through the script, and will never come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from farandole.collectives.named.disagreement import ranks_in_words
from farandole.collectives.named.negotiation import UnmatchedOperation
from farandole.collectives.named.operation_requests import Key

_LISTED = 5  # of operations that wait for the same ranks, a warning names only so many


@dataclass(frozen=True)
class StallReport:
    """What one look at the waiting operations finds.

    warnings  sentences for the log: the same on all ranks, so that one of them is enough to say them
    expired   operations that have waited for too long; to be said in the next round
    """

    warnings: tuple[str, ...] = ()
    expired: tuple[Key, ...] = ()


_NOTHING = StallReport()


class StallWatch:
    """Told the time and what waits, now and then; its answers are as fine as it is told often.

    warning_s  an operation that waits as long is warned of, and again each time it has waited as long again;
               0 for never
    abort_s    an operation that waits as long has expired; 0 for never
    """

    def __init__(self, warning_s: float = 60.0, abort_s: float = 0.0) -> None:
        if warning_s < 0 or abort_s < 0:
            raise ValueError(f"stall times must not be negative, got warning_s={warning_s}, abort_s={abort_s}")
        self._warning_s, self._abort_s = warning_s, abort_s
        self._since_s: dict[tuple[Key, int], float] = {}
        self._warned: dict[tuple[Key, int], int] = {}

    @property
    def is_on(self) -> bool:
        """Whether it has to be asked at all."""
        return self._warning_s > 0 or self._abort_s > 0

    def check(self, now_s: float, waiting: Sequence[UnmatchedOperation]) -> StallReport:
        """What is to be said of the operations that wait now, all of them."""
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
    """A sentence for each set of ranks that is waited for."""
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
