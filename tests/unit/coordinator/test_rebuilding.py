"""What becomes of a job whose coordinator has lost its journal, by what its agents tell."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from farandole.base.config import JobConfig
from farandole.base.events.host_events import JobRebuilt
from farandole.base.events.job_events import JobEnds
from farandole.base.membership import DataAddress, GenerationId
from farandole.base.wire.link_messages import Abort, Newcomer, Ready, Start
from farandole.base.wire.message import PROTOCOL_VERSION
from farandole.base.wire.messages import (
    AgentHello,
    ForwardToWorkers,
    FromWorker,
    Kill,
    StartWorkers,
    ToldWorker,
    WorkersTold,
)
from farandole.job.coordinator.decide import decide
from farandole.job.coordinator.job import Job, new_job
from farandole.job.coordinator.rebuilding import ToldAgent, is_enough, rebuilt, why_not_believed
from farandole.job.coordinator.transition import Action, AgentReported, Log, SendAgent, Tick

CONFIG = JobConfig(3, deferred_restart_s=0.0)
FIRST, SECOND = (GenerationId(1, 1, number, f"job-{number}") for number in (4, 5))
NOW_S = 100.0


def member(rank: int, size: int = 3, id: GenerationId = FIRST, **known: object) -> ToldWorker:
    told = ToldWorker(
        f"w{rank}",
        rank,
        address=DataAddress("127.0.0.1", 20000 + rank),
        pid=1,
        has_met=True,
        is_elastic=True,
        generation=id,
        rank=rank,
        size=size,
        announced=id.number,
        ready=id.number,
        synced=id.number,
    )
    return msgspec.structs.replace(told, **known)


def agent(name: str, *workers: ToldWorker, slots: int = 8, **known: str) -> ToldAgent:
    hello = AgentHello(name, f"host-{name}", slots, PROTOCOL_VERSION, process="p", is_apart=True)
    number = max((each.announced for each in workers), default=0)
    return ToldAgent(hello, WorkersTold("job", workers, number, **known))


def told(*agents: ToldAgent) -> Mapping[str, ToldAgent]:
    return {each.hello.agent: each for each in agents}


def rebuild(*agents: ToldAgent) -> tuple[Job, list[Action]]:
    job, actions = rebuilt(new_job(CONFIG, "job", coordinator_epoch=2_000_000), told(*agents), "it was removed", NOW_S)
    job, more = decide(job, [Tick()], NOW_S)
    return job, [*actions, *more]


def orders(actions: list[Action]) -> list[tuple[str, object]]:
    return [(each.agent, each.message) for each in actions if isinstance(each, SendAgent)]


def events(actions: list[Action]) -> list[object]:
    return [each.event for each in actions if isinstance(each, Log)]


def test_a_job_of_which_all_members_are_told_goes_on_as_it_is() -> None:
    job, actions = rebuild(agent("b", member(2)), agent("a", member(0), member(1)))
    assert orders(actions) == []
    assert job.generation is not None
    assert (job.generation.id, job.generation.members) == (FIRST, ("w0", "w1", "w2"))
    assert (job.number, job.change, job.is_elastic, job.was_synced) == (1000, None, True, True)
    assert [each.name for each in sorted(job.agents.values(), key=lambda each: each.order)] == ["a", "b"]
    assert events(actions) == [JobRebuilt(("w0", "w1", "w2"), 4, 0, "it was removed")]


def test_names_and_numbers_that_may_have_been_used_are_not_used_again() -> None:
    job, _ = rebuild(agent("a", member(0), member(1), member(2, announced=9)))
    assert (job.number, job.spawned) == (1001, 1000)  # an ABORT was announced: all get another one


@pytest.mark.parametrize("known", [{"announced": 6}, {"announced": 6, "ready": 6}])
def test_a_change_that_was_under_way_becomes_a_regroup_of_all(known: dict[str, int]) -> None:
    job, actions = rebuild(agent("a", member(0), member(1, **known)), agent("b", member(2)))
    assert [message for _, message in orders(actions)] == [
        ForwardToWorkers(("w0", "w1"), Abort(1001, "a change was under way when the coordinator lost its journal")),
        ForwardToWorkers(("w2",), Abort(1001, "a change was under way when the coordinator lost its journal")),
    ]
    for name, of in (("w0", "a"), ("w1", "a"), ("w2", "b")):
        job, actions = decide(job, [AgentReported(of, FromWorker(name, Ready(1001)))], NOW_S)
    starts = {name: each for _, message in orders(actions) for name, each in message.starts.items()}  # type: ignore[attr-defined]
    assert starts["w2"].id == GenerationId(1, 2_000_000, 1001, "job-1001")
    assert not starts["w2"].bootstrap


def test_the_others_go_on_without_members_that_nobody_tells_of() -> None:
    job, actions = rebuild(agent("a", member(0), member(1)))
    assert ("a", ForwardToWorkers(("w0", "w1"), Abort(1001, "1 member of generation 4 is lost"))) in orders(actions)
    assert job.ending is None


def test_a_generation_that_was_not_announced_to_all_its_members_is_replaced_by_one_of_all() -> None:
    """START 5 has reached w0 only: the others may be its members, and have the state of generation 4."""
    one = member(0, size=3, id=SECOND)
    job, actions = rebuild(agent("a", one, member(1, size=3)), agent("b", member(2, id=SECOND)))
    assert job.generation is not None
    assert job.generation.members == ("w0", "w1", "w2")
    assert [message for _, message in orders(actions)] == [
        ForwardToWorkers(("w0", "w1"), Abort(1001, "1 member of generation 5 is lost")),
        ForwardToWorkers(("w2",), Abort(1001, "1 member of generation 5 is lost")),
    ]


def test_a_worker_that_the_others_have_continued_without_is_ended() -> None:
    late = member(3, size=4)
    _, actions = rebuild(agent("a", *(member(rank, id=SECOND) for rank in range(3)), late))
    assert orders(actions) == [("a", Kill("w3", 0.0, "the others have continued without it"))]


def test_a_newcomer_is_told_again_that_it_is_one() -> None:
    newcomer = ToldWorker("w3", 3, address=DataAddress("127.0.0.1", 20003), pid=1, has_met=True)
    _, actions = rebuild(agent("a", *map(member, range(3)), newcomer))
    assert orders(actions) == [("a", ForwardToWorkers(("w3",), Newcomer(3)))]


def test_workers_that_wait_for_the_beginning_begin() -> None:
    waiting = [ToldWorker(f"w{i}", i, address=DataAddress("127.0.0.1", 20000 + i), pid=1) for i in range(3)]
    _, actions = rebuild(agent("a", *waiting))
    ((_, message),) = orders(actions)
    assert isinstance(message, StartWorkers)
    assert all(isinstance(each, Start) and each.bootstrap for each in message.starts.values())


def test_a_job_whose_members_were_released_waits_for_their_exits() -> None:
    job, actions = rebuild(agent("a", member(0, finished=4, released=4)))
    assert orders(actions) == []
    assert (job.is_released, job.ending) == (True, None)


def test_members_that_had_finished_and_were_not_released_are_released() -> None:
    _, actions = rebuild(agent("a", *(member(rank, finished=4) for rank in range(3))))
    assert [type(message.message).__name__ for _, message in orders(actions)] == ["Released"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("workers", "found"),
    [
        ([], "no member"),
        ([member(0)], "1 of 3 workers of generation 4"),
        ([member(0, 4), member(1, 4)], "2 of 4"),
        ([ToldWorker(f"w{slot}", slot, is_newcomer=True) for slot in range(3)], "no member"),
        ([ToldWorker("w0", 0)], "no member"),
    ],
)
def test_a_job_without_a_majority_ends(workers: list[ToldWorker], found: str) -> None:
    """Nothing is decided before the patience of the agents is over (is_enough)."""
    assert not is_enough(told(agent("a", *workers)), 3)
    _, actions = rebuild(agent("a", *workers))
    (end,) = [each for each in events(actions) if isinstance(each, JobEnds)]
    assert end.exit_code == 1
    assert f"The job cannot be rebuilt: its agents have told of {found}" in end.reason


def test_a_script_that_cannot_regroup_ends_when_a_member_is_not_told() -> None:
    _, actions = rebuild(agent("a", *(member(rank, is_elastic=False) for rank in range(2))))
    (end,) = [each for each in events(actions) if isinstance(each, JobEnds)]
    assert "1 member of generation 4 is lost with the coordinator's journal" in end.reason


def test_a_job_that_was_ending_ends() -> None:
    _, actions = rebuild(agent("a", *map(member, range(3)), ending="SIGINT was received"))
    assert [each.reason for each in events(actions) if isinstance(each, JobEnds)] == ["SIGINT was received"]


@pytest.mark.parametrize(
    ("one", "problem"),
    [
        (ToldAgent(agent("b").hello, WorkersTold("another", ())), "it serves job another, and this is job job"),
        (agent("b", member(0)), "'w0', which is no name of a worker or that of another one"),
        (agent("b", member(1, worker="../w1")), "'../w1', which is no name of a worker"),
        (agent("b", member(1, slot=8)), "worker w1 in slot 8, which it has not or has twice"),
        (agent("b", member(1), member(2, slot=1)), "worker w2 in slot 1, which it has not or has twice"),
        (
            agent("b", msgspec.structs.replace(member(1), rank=0)),
            "worker w1 as rank 0 of 3, which there is not or twice",
        ),
        (
            agent("b", msgspec.structs.replace(member(1), rank=3)),
            "worker w1 as rank 3 of 3, which there is not or twice",
        ),
    ],
)
def test_what_cannot_be_a_part_of_the_job_is_not_believed(one: ToldAgent, problem: str) -> None:
    others = told(agent("a", member(0)))
    assert problem in why_not_believed("job", one.hello, one.told, others)
    assert not why_not_believed("job", agent("b", member(1)).hello, agent("b", member(1)).told, others)


def test_an_agent_that_tells_again_replaces_what_it_has_told() -> None:
    again = agent("a", member(0), member(1))
    assert not why_not_believed("job", again.hello, again.told, told(agent("a", member(0))))
