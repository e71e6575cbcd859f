"""The order in which the samples of several streams are trained, for any number of workers. Pure; used by the stream
loader.

The streams take turns, with a few samples each, until they have ended. The order does not depend on the readers of the
streams, so that a global batch is the same one for every world.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class StreamPosition:
    """The position in an epoch.

    offsets  number of samples taken from each stream
    turn     the stream whose turn is next
    """

    offsets: tuple[int, ...]
    turn: int = 0

    @property
    def cursor(self) -> int:
        """Number of samples taken from all streams."""
        return sum(self.offsets)


def walk(
    place: StreamPosition, count: int, run: int, has: Callable[[int, int], bool]
) -> tuple[list[tuple[int, int]], StreamPosition]:
    """Return the next `count` samples as (stream, number in it), fewer at the end of the epoch, and the position behind
    them.

    run  most samples of a stream at its turn, at least 1
    has  returns whether a stream has a sample of this number; called for rising numbers without gaps
    """
    offsets, turn, streams = list(place.offsets), place.turn, len(place.offsets)
    taken: list[tuple[int, int]] = []
    ended: set[int] = set()
    while len(taken) < count and len(ended) < streams:
        for _ in range(min(run, count - len(taken)) if turn not in ended else 0):
            if not has(turn, offsets[turn]):
                ended.add(turn)
                break
            taken.append((turn, offsets[turn]))
            offsets[turn] += 1
        turn = (turn + 1) % streams
    return taken, StreamPosition(tuple(offsets), turn)
