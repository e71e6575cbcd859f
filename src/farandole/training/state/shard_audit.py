"""The audit of shards in strict mode: which of them are computed again, by which ranks, and which ranks have computed
wrongly. Pure: equal on all ranks without a message, but the results themselves.

In an audited step each rank computes one shard of another rank again. Where the results differ, the step is aborted and
comes again with the same shards and other auditors, a *round*, until it is known which rank was wrong.
"""

from __future__ import annotations

import hashlib
import struct
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from farandole.training.collectives.shard_tree import Division

MOST_ROUNDS = 3
"""Rounds after which two different results cannot be explained."""

_UINT64 = (1 << 64) - 1


class Audit(msgspec.Struct, frozen=True):
    """The audit of one global batch: the audited shard of each rank, by rank; -1 for a rank without shards. Rank r
    computes that of rank (r + shift) % size again."""

    shards: tuple[int, ...]
    shift: int

    def again(self, rank: int) -> int:
        """Return the shard of another rank that this rank computes again; -1: none."""
        return self.shards[(rank + self.shift) % len(self.shards)]

    def auditor(self, owner: int) -> int:
        """Return the rank that computes the audited shard of `owner` again."""
        return (owner - self.shift) % len(self.shards)


class AuditRule(msgspec.Struct, frozen=True):
    """The rule by which audits are drawn: a fraction of the shards, from 0 to 1, is audited, at most one of each rank
    in a step. In round 0, global batches are drawn with the loader's seed; from 1 on every one is audited, each round
    by other ranks."""

    fraction: float
    seed: int
    round: int = 0

    def draw(self, division: Division, epoch: int, start: int) -> Audit | None:
        """Return the audit of the global batch that starts at position `start` of the epoch's order; None: none. A
        single worker has no one who could audit it."""
        size = len(division.ranges)
        if size == 1 or not self.fraction:
            return None
        parts = struct.pack("<3Q", self.seed & _UINT64, epoch, start)
        coin, shift, place = struct.unpack("<3Q", hashlib.blake2b(parts, digest_size=24, person=b"audit").digest())
        # All ranks audit in the same step: it costs them the time of one shard, and a step that only one rank audits
        # would cost the others that time, too, since they wait.
        if not self.round and coin >= self.fraction * division.shards / size * 2.0**64:
            return None
        return Audit(
            tuple(
                first + (place + rank) % (stop - first) if stop > first else -1
                for rank, (first, stop) in enumerate(division.ranges)
            ),
            1 + (shift + self.round) % (size - 1),
        )


class Claim(NamedTuple):
    """A result of a shard: its digest, and the rank that has computed it."""

    rank: int
    digest: int


def judge(claims: Sequence[Claim], is_last: bool) -> frozenset[int] | None:
    """Return the ranks that computed a shard wrongly, from all results of all rounds; None: it is not known yet.

    A result that two ranks have found independently is right. Two workers can disagree for ever: after the last round,
    the one is right that always had the same result, if the other one had not.
    """
    ranks: defaultdict[int, set[int]] = defaultdict(set)
    results: defaultdict[int, list[int]] = defaultdict(list)
    for rank, digest in claims:
        ranks[digest].add(rank)
        results[rank].append(digest)
    right = {digest for digest, found in ranks.items() if len(found) > 1}
    if not right and is_last:
        repeated = {rank: found for rank, found in results.items() if len(found) > 1}
        steady = [found[0] for found in repeated.values() if len(set(found)) == 1]
        right = set(steady) if len(steady) == 1 < len(repeated) else set()
    if len(right) != 1:
        return None
    wrong = frozenset(rank for rank, digest in claims if digest not in right)
    return None if wrong == results.keys() else wrong  # the right result is one that no rank can repeat


class Finding(msgspec.Struct, frozen=True):
    """The outcome of an inquiry: the ranks that computed a shard wrongly, or none if it could not be found out; and the
    other ranks that computed it, too: rightly, if there are culprits."""

    shard: int
    culprits: tuple[int, ...]
    witnesses: tuple[int, ...]


class Inquiry:
    """The results of shards that two ranks have computed differently; the first ones are given as to Auditor.compare().

    round    number of the round that is due
    is_open  results differed, so that there is something to inquire
    """

    def __init__(self, audit: Audit, own: Sequence[int], again: Sequence[int]) -> None:
        self.round = 0
        self._claims: dict[int, list[Claim]] = {}  # by the owner of the shard
        for owner, digest in enumerate(own):
            if again[audit.auditor(owner)] != digest:
                self._claims[owner] = []
        self.is_open = bool(self._claims)
        self._add(audit, own, again)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The owner and the auditor of each of these shards."""
        return [(claims[0].rank, claims[1].rank) for claims in self._claims.values()]

    def hear(self, audit: Audit, own: Sequence[int], again: Sequence[int]) -> Finding | None:
        """Take the results of the round. Return the outcome, or None: another round is due."""
        self._add(audit, own, again)
        is_last = self.round > MOST_ROUNDS
        judged = {owner: judge(claims, is_last) for owner, claims in self._claims.items()}
        for owner, found in judged.items():
            if found:
                witnesses = {claim.rank for claim in self._claims[owner]} - found
                return Finding(audit.shards[owner], tuple(sorted(found)), tuple(sorted(witnesses)))
        if not is_last:
            return None
        owner, claims = min(self._claims.items())
        return Finding(audit.shards[owner], (), tuple(sorted({claim.rank for claim in claims})))

    def _add(self, audit: Audit, own: Sequence[int], again: Sequence[int]) -> None:
        for owner, claims in self._claims.items():
            auditor = audit.auditor(owner)
            claims += [Claim(owner, own[owner]), Claim(auditor, again[auditor])]
        self.round += 1
