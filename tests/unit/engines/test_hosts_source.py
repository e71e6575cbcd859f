"""Which answers of a host discovery a job follows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from farandole.base.config import JobConfig
from farandole.base.events.event import Event
from farandole.base.events.host_events import HostDiscoveryFailed
from farandole.job.engines.discovery import ANSWERS_IN_A_ROW, HostsOver, HostsSource
from farandole.job.engines.host_list import HostSlots
from tests.support.waiting import run

HERE = (HostSlots("localhost", 2),)
NONE: tuple[HostSlots, ...] = ()


class Answers:
    """A discovery with these answers, and no more hosts after them."""

    period_s = 0.0

    def __init__(self, answers: Sequence[tuple[HostSlots, ...]]) -> None:
        self._answers = iter(answers)

    async def find(self) -> tuple[HostSlots, ...]:
        await asyncio.sleep(0)
        for answer in self._answers:
            return answer
        raise HostsOver("the answers are over")


def followed(*answers: tuple[HostSlots, ...]) -> tuple[list[tuple[HostSlots, ...]], list[Event]]:
    """The lists of hosts that the job gets after the first answer, and what it reports."""
    events: list[Event] = []
    lists: list[tuple[HostSlots, ...]] = []

    async def follow() -> None:
        source = HostsSource(JobConfig(num_proc=2), Answers(answers), takes_others=False, on_event=events.append)
        await source.first()
        try:
            await source.follow(lists.append)
        except HostsOver:
            return

    run(follow())
    return lists, events


def test_an_empty_answer_now_and_then_changes_nothing() -> None:
    lists, events = followed(HERE, NONE, HERE, NONE, NONE, HERE)
    assert lists == []
    assert [type(each) for each in events] == [HostDiscoveryFailed]  # not for each of them


def test_empty_answers_in_a_row_are_believed() -> None:
    lists, events = followed(HERE, *[NONE] * ANSWERS_IN_A_ROW, HERE)
    assert lists == [NONE, HERE]
    assert len(events) == 1


def test_hosts_that_are_missing_beside_others_are_gone_at_once() -> None:
    more = (*HERE, HostSlots("127.0.0.1", 1))
    lists, events = followed(more, HERE)
    assert lists == [HERE]
    assert events == []


def test_a_job_without_hosts_waits_for_the_first_one() -> None:
    lists, events = followed(NONE, NONE, HERE)
    assert lists == [HERE]
    assert events == []


def slots(*numbers: int) -> list[tuple[HostSlots, ...]]:
    return [(HostSlots("localhost", number),) for number in numbers]


def test_slots_that_come_and_go_are_kept() -> None:
    lists, events = followed(*slots(2, 1, 2, 1, 2, 1, 1, 2, 1, 3, 1))
    assert lists == slots(1, 2, 3)
    assert events == []


def test_slots_that_have_come_back_are_gone_after_answers_in_a_row() -> None:
    lists, _ = followed(*slots(2, 1, 2, *[1] * ANSWERS_IN_A_ROW, 1))
    assert lists == slots(1, 2, 1)


def test_hosts_that_take_turns_are_all_kept() -> None:
    one, other = (HostSlots("localhost", 2),), (HostSlots("127.0.0.1", 2),)
    lists, _ = followed(*[one, other] * 6)
    assert [set(each) for each in lists] == [{*other}, {*one}, {*one, *other}]


def test_a_host_that_loses_slots_again_and_again_without_getting_any_is_believed() -> None:
    lists, _ = followed(*slots(4, 3, 2, 1))
    assert lists == slots(3, 2, 1)
