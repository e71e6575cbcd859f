"""A barrier that says which ranks have not reached it: monitored_barrier() of c10d_group.py.

Each rank sends a message to rank 0, which waits for all of them and answers. The errors are those of Gloo (torch 2.13,
monitoredBarrier in torch/csrc/distributed/c10d/ProcessGroupGloo.cpp), which scripts compare.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta

from farandole.base.machine import now_s
from farandole.errors import CollectiveMismatch
from farandole.training.collectives.point_to_point import PointToPoint


class BarrierCount:
    """Numbers the monitored barriers of one group, from 0 in each generation: newcomers count with the others."""

    def __init__(self) -> None:
        self._p2p: PointToPoint | None = None
        self._number = 0

    def next_subject(self, p2p: PointToPoint, group: bytes) -> bytes:
        """Return the subject of the messages of the next barrier.

        Args:
            p2p: The connections of the current generation.
            group: 8 bytes that distinguish the group from others.
        """
        if p2p is not self._p2p:
            self._p2p, self._number = p2p, 0
        number, self._number = self._number, self._number + 1
        return b"barrier " + group + number.to_bytes(8, "big")


def lead(
    p2p: PointToPoint, ranks: Sequence[int], subject: bytes, timeout: timedelta | None, names_all_missing: bool
) -> None:
    """Wait for all others, as rank 0. Those that have arrived are told of an error.

    Raises CollectiveMismatch when a rank has not arrived in time.
    """
    timeout_s = math.inf if timeout is None else timeout.total_seconds()
    expected = {rank: p2p.expect(ranks[rank], subject) for rank in range(1, len(ranks))}
    deadline_s = now_s() + timeout_s
    error = ""
    arrived, missing = list[int](), list[int]()
    for rank, message in expected.items():
        remaining_s = deadline_s - now_s()
        if remaining_s <= 0 and not names_all_missing:
            error = f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {1000 * timeout_s:g} ms. {_of(arrived)}"
            break
        if p2p.arrives(message, max(0.0, remaining_s)):
            arrived.append(rank)
            continue
        missing.append(rank)
        if not names_all_missing:
            break
    if missing:
        names = ", ".join(map(str, missing))
        noun = "Ranks" if names_all_missing else "Rank"
        error = f"[Rank 0]: {noun} {names} failed to pass monitoredBarrier in {1000 * timeout_s:g} ms"
    for rank, message in expected.items():
        # A rank that has not arrived may be stopped: a message to it could take minutes.
        if message.message is not None:
            p2p.send(ranks[rank], subject, error.encode())
    if error:
        raise CollectiveMismatch(error)


def follow(p2p: PointToPoint, ranks: Sequence[int], subject: bytes) -> None:
    """Wait for the answer of rank 0, as another rank. Raises CollectiveMismatch when rank 0 has not met all others."""
    p2p.send(ranks[0], subject)
    answer = p2p.wait_for(p2p.expect(ranks[0], subject)).content
    if answer:
        raise CollectiveMismatch(
            f"Rank {ranks.index(p2p.rank)} successfully reached monitoredBarrier, but received errors while waiting "
            f"for send/recv from rank 0. Please check rank 0 logs for faulty rank. {answer.decode()}"
        )


def _of(arrived: list[int]) -> str:
    if not arrived:
        return "No ranks successfully processed in monitoredBarrier."
    return f"Successfully processed ranks: {', '.join(map(str, arrived))}"
