"""A worker of a strict job that has computed a shard wrongly: it ends, and its slot, or its host, is not used again."""

from __future__ import annotations

from farandole.base.events.host_events import HostDrained
from farandole.base.events.worker_events import ShardWrong
from farandole.base.wire.link_messages import ShardDiffered
from farandole.base.wire.messages import Kill
from tests.support.told_job import ToldJob

WRONG = ShardDiffered(1, step=17, shard=3, ranks=(1,), witnesses=(0, 2))


def test_the_worker_is_named_and_its_slot_is_not_filled_again() -> None:
    told = ToldJob(3).training().says("w0", WRONG)
    (found,) = told.logged(ShardWrong)
    assert found.line() == (
        "w1 on host-a has computed shard 3 of step 17 wrongly, as the results of w0, w2 show. It ends, and its slot is "
        "not used again; test the processor and the memory of host-a"
    )
    assert not told.says("w1", WRONG).logged(ShardWrong), "said by another rank before"
    told.raised("w1", "WrongResult: strict mode").ready(2, "w0", "w2").synced("w0", "w2")
    assert told.members == ("w0", "w2")
    assert told.spawned() == {}
    assert told.job.target == 3


def test_a_free_slot_gets_a_worker_instead() -> None:
    told = ToldJob(3, slots=4).training().says("w0", WRONG)
    told.raised("w1", "WrongResult: strict mode").ready(2, "w0", "w2")
    assert told.job.slots[told.job.workers["w3"].slot].is_open
    assert told.job.workers["w3"].slot.index == 3


def test_a_worker_that_does_not_end_is_killed() -> None:
    told = ToldJob(3).training().says("w0", WRONG)
    assert not told.sent(Kill)
    assert [kill.worker for kill in told.passes(told.config.grace_s + 1).sent(Kill)] == ["w1"]


def test_the_host_of_the_worker_is_drained_where_others_have_enough_workers() -> None:
    told = ToldJob(4, slots=2).connect("b", 2).training()
    told.says("w0", ShardDiffered(1, 17, 3, ranks=(2,), witnesses=(0, 1)))
    assert told.logged(HostDrained) == [HostDrained("host-b", "w2 has computed wrongly there", ("w3",))]
    assert not ToldJob(4, slots=2, min_np=3).connect("b", 2).training().says("w0", WRONG).logged(HostDrained)


def test_what_is_said_of_an_earlier_generation_does_not_count() -> None:
    told = ToldJob(3).training().exited("w2", -9).ready(2, "w0", "w1")
    assert not told.says("w0", WRONG).logged(ShardWrong)
