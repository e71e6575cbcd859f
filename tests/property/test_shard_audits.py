"""Audits of strict mode under random faults: each wrong result of an audited shard is found, and its rank is named; no
other one ever is."""

from __future__ import annotations

import os
import random

import pytest

from farandole.training.collectives.shard_tree import divide
from farandole.training.state.shard_audit import Audit, AuditRule, Finding, Inquiry

SCHEDULES = int(os.environ.get("AUDIT_SCHEDULES", "5000"))


class Machine:
    """The results of all ranks, of which one or none computes wrongly from now on, or once.

    kind  once, always, random; None: never
    """

    def __init__(self, draw: random.Random, culprit: int, kind: str | None) -> None:
        self._draw, self._culprit, self._kind = draw, culprit, kind
        self.wrong = 0

    def result(self, rank: int, shard: int) -> int:
        right = hash((shard, "right")) % 2**64
        if shard < 0 or rank != self._culprit or self._kind is None or (self._kind == "once" and self.wrong):
            return right
        self.wrong += 1
        return (right + (self._draw.getrandbits(63) + 1 if self._kind == "random" else 1)) % 2**64

    def results(self, audit: Audit) -> tuple[list[int], list[int]]:
        ranks = range(len(audit.shards))
        return (
            [self.result(rank, audit.shards[rank]) for rank in ranks],
            [self.result(rank, audit.again(rank)) for rank in ranks],
        )


def outcome(machine: Machine, rule: AuditRule, division: object, start: int) -> Finding | None:
    """What all ranks find out about the step; None: nothing differed."""
    audit = rule.draw(division, 0, start)  # type: ignore[arg-type]
    if audit is None:
        return None
    inquiry = Inquiry(audit, *machine.results(audit))
    while inquiry.is_open:
        again = AuditRule(rule.fraction, rule.seed, inquiry.round).draw(division, 0, start)  # type: ignore[arg-type]
        assert again is not None
        assert again.shards == audit.shards
        found = inquiry.hear(again, *machine.results(again))
        if found is not None:
            return found
    return None


@pytest.mark.parametrize("kind", ["once", "always", "random", None])
def test_every_wrong_result_of_an_audited_shard_is_found_and_its_rank_named(kind: str | None) -> None:
    seed = random.getrandbits(32)
    draw = random.Random(seed)
    for number in range(SCHEDULES):
        world = draw.randint(2, 8)
        shares = tuple(draw.randint(0, 3) for _ in range(world - 1))
        division = divide(draw.randint(world, 4 * world), (*shares, 1))
        culprit = draw.randrange(world)
        machine = Machine(draw, culprit, kind)
        found = outcome(machine, AuditRule(draw.choice([0.1, 1.0]), draw.getrandbits(64)), division, number)
        story = f"seed {seed}, schedule {number}: {division}, {kind} by {culprit}: {found}"
        assert (found is not None) == (machine.wrong > 0), story
        if found is None:
            continue
        if found.culprits:
            assert found.culprits == (culprit,), story
            assert culprit not in found.witnesses, story
        else:  # two ranks alone, each of which has the same result again
            assert (world, kind) == (2, "always"), story
