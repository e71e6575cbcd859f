"""The job of a coordinator whose journal is lost, rebuilt from what the agents tell of their workers. Pure.

The agents know their workers, the generation and the rank of each, and what each has said. If all members of the newest
generation are told of, and no change was under way, the job goes on as it is. If some are missing, or a change had been
announced, all that were told of regroup, with a number above all that they have seen; they compare their progress as
after any other loss. Without a strict majority of the newest generation nothing is decided: the others may train on
somewhere (`is_enough`).

Nobody has told: how often slots were refilled and hosts failed, which hosts are drained, a size that was set by a
command, how many steps were decided, and what the newest checkpoint is. All that begins anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from farandole.base.events.host_events import JobRebuilt
from farandole.base.membership import GenerationId
from farandole.base.wire.channel import HANDSHAKE_DEADLINE_S
from farandole.base.wire.link_messages import Leaving, Newcomer
from farandole.base.wire.messages import AgentHello, ToldWorker, WorkersTold
from farandole.job.coordinator import regroup, worker_failure, worker_messages
from farandole.job.coordinator.job import AgentRecord, Generation, Job, Slot, SlotUse, Worker
from farandole.job.coordinator.sentences import counted
from farandole.job.coordinator.transition import Action, Input, StopRequested, Transition

TELLING_S = 2 * HANDSHAKE_DEADLINE_S
"""Seconds for which agents may tell of their workers after the journal was lost. They look for this coordinator every
half second, and may be held up by addresses that do not answer."""

_NAME = re.compile(r"w(0|[1-9]\d{0,8})")
_AHEAD = 1000
"""Later workers and generations have numbers from the next multiple of this: no number is used again, and those of
workers that have ended, and of generations that were not announced to all, may have been higher than all that are told.
"""


@dataclass(frozen=True)
class ToldAgent:
    """What one agent has told."""

    hello: AgentHello
    told: WorkersTold


class Retelling:
    """The time in which agents tell what the job is, and nothing is decided. It is over, or has not begun, while
    `reason` is empty.

    num_proc    the workers of the job, as in is_enough
    patience_s  for so long agents of other machines keep their workers without a coordinator
    on_rebuilt  called with the job of which the agents have told

    Attributes:
        reason: Why the former state is lost.
        told: What agents have told, by their names.
    """

    def __init__(self, num_proc: int, patience_s: float, on_rebuilt: Callable[[Job], None]) -> None:
        self._num_proc, self._patience_s, self._on_rebuilt = num_proc, patience_s, on_rebuilt
        self.reason = ""
        self.told: dict[str, ToldAgent] = {}
        self._since_s = 0.0

    def begin(self, reason: str, now_s: float) -> None:
        self.reason, self._since_s = reason, now_s

    def may_end(self, now_s: float, inputs: Sequence[Input]) -> bool:
        """Return whether the agents have had the time to tell of their workers, or the user wants the job to end."""
        waited_s = now_s - self._since_s
        is_time = waited_s >= TELLING_S and (is_enough(self.told, self._num_proc) or waited_s >= self._patience_s)
        return is_time or any(isinstance(each, StopRequested) for each in inputs)

    def rebuild(self, job: Job, now_s: float) -> tuple[Job, list[Action]]:
        """Return the job of which the agents have told, and the actions with which it goes on."""
        job, actions = rebuilt(job, self.told, self.reason, now_s)
        self.reason, self.told = "", {}
        self._on_rebuilt(job)
        return job, actions


def why_not_believed(job_id: str, hello: AgentHello, told: WorkersTold, others: Mapping[str, ToldAgent]) -> str:
    """Return why what an agent tells cannot be a part of the job; empty if it can. `others`: by name, what the other
    agents have told."""
    if told.job_id != job_id:
        return f"it serves job {told.job_id}, and this is job {job_id}"
    known = {each.worker for name, other in others.items() if name != hello.agent for each in other.told.workers}
    places: set[tuple[GenerationId | None, int]] = {
        (each.generation, each.rank)
        for name, other in others.items()
        if name != hello.agent
        for each in other.told.workers
    }
    slots = set[int]()
    for each in told.workers:
        place = (each.generation, each.rank)
        if not _NAME.fullmatch(each.worker) or each.worker in known:
            return f"it tells of a worker {each.worker!r}, which is no name of a worker or that of another one"
        if not 0 <= each.slot < hello.slots or each.slot in slots:
            return f"it tells of worker {each.worker} in slot {each.slot}, which it has not or has twice"
        if each.generation is not None and (not 0 <= each.rank < each.size or place in places):
            return f"it tells of worker {each.worker} as rank {each.rank} of {each.size}, which there is not or twice"
        known.add(each.worker)
        slots.add(each.slot)
        places.add(place)
    return ""


def is_enough(told: Mapping[str, ToldAgent], num_proc: int) -> bool:
    """Return whether a job of so many workers can be rebuilt: a strict majority of the newest generation is told of, or
    some of it if it was released. Where nobody tells of a generation, all members may be lost, and a job never starts
    again at step 0 by itself: it can be rebuilt only if all workers wait for the first one."""
    workers = [each for _, each in _told_workers(told)]
    newest = _newest(workers)
    if newest is None:
        has_begun = any(each.told.number for each in told.values()) or any(each.is_newcomer for each in workers)
        return len(workers) >= num_proc and not has_begun
    members = [each for each in workers if each.generation == newest]
    return 2 * len(members) > members[0].size or any(each.released == newest.number for each in members)


def rebuilt(job: Job, told: Mapping[str, ToldAgent], reason: str, now_s: float) -> tuple[Job, list[Action]]:
    """Return a job that begins as that of which the agents have told, and the actions with which it goes on; it ends
    where not enough is told. `reason`: why the journal is lost."""
    workers = [each for _, each in _told_workers(told)]
    newest = _newest(workers)
    members = sorted((each for each in workers if each.generation == newest is not None), key=lambda each: each.rank)
    missing = members[0].size - len(members) if members else 0
    number = newest.number if newest is not None else 0
    announced = max([job.number, *(each.told.number for each in told.values())])
    was_released = any(each.released == number > 0 for each in members)
    static_because = next((each.static_because for each in members if was_released and each.static_because), "")
    is_over = was_released and not static_because
    # Workers of older generations have been excluded, unless the newest one was not announced to all of its members.
    former = _former(workers, newest) if missing and not was_released else []
    in_order = sorted(
        (*members, *former), key=lambda each: (each.rank, each.generation.number if each.generation else 0)
    )
    transition = Transition(
        replace(
            job,
            agents=_agents(job, told, members),
            workers={each.worker: _worker(job, agent, each, newest, now_s) for agent, each in _told_workers(told)},
            slots={Slot(agent, each.slot): SlotUse() for agent, each in _told_workers(told)},
            spawned=_far_above(max(int(each.worker[1:]) for each in workers)) if workers else 0,
            number=_far_above(announced) if workers else job.number,
            run_id=job.run_id if newest is None else newest.run_id,
            generation=None if newest is None else Generation(newest, tuple(each.worker for each in in_order)),
            is_elastic=any(each.is_elastic for each in workers) and not static_because,
            was_synced=any(each.synced for each in in_order) and not static_because,
            is_finishing=not was_released and any(each.finished == number >= each.ready for each in members),
            is_released=is_over,
            static_because=static_because,
            has_met=any(each.has_met for each in workers),
            attempt=max((each.told.attempt for each in told.values()), default=0),
        ),
        now_s,
    )
    transition.log(JobRebuilt(tuple(each.worker for each in workers), number, missing, reason))
    _go_on(transition, told, {each.worker for each in in_order}, missing, announced > number)
    return transition.job, transition.actions


def _go_on(
    transition: Transition,
    told: Mapping[str, ToldAgent],
    members: Collection[str],
    missing: int,
    has_change: bool,
) -> None:
    """Bring the workers to where the messages that were lost would have brought them."""
    job, workers = transition.job, [each for _, each in _told_workers(told)]
    if not is_enough(told, job.config.num_proc):
        number = job.generation_number
        found = f"{len(members)} of {counted(len(members) + missing, 'worker')} of generation {number}"
        transition.end(1, f"The job cannot be rebuilt: its agents have told of {found if members else 'no member'}.")
        return
    if ending := next((each.told.ending for each in told.values() if each.told.ending), ""):
        transition.end(1, ending)
        return
    for each in workers:
        if each.generation is not None and each.worker not in members:
            transition.kill(each.worker, 0.0, "the others have continued without it")
        elif job.generation is not None and each.generation is None and each.address and not each.is_newcomer:
            transition.send_to_workers([each.worker], Newcomer(len(members)))
        if each.is_leaving and not each.has_left:
            worker_messages.handle(transition, transition.job.workers[each.worker], Leaving())
        if each.is_dying:
            worker_failure.worker_dying(transition, transition.job.workers[each.worker])
    if job.generation is None or job.is_released:
        return
    lost = f"{counted(missing, 'member')} of generation {job.generation.number} {'is' if missing == 1 else 'are'} lost"
    if not job.is_elastic:
        if missing:
            transition.end(1, f"{lost} with the coordinator's journal, and the script cannot continue without them.")
    elif missing or has_change:
        transition.faults.append(lost if missing else "a change was under way when the coordinator lost its journal")
    regroup.abort_for_faults(transition)


def _told_workers(told: Mapping[str, ToldAgent]) -> list[tuple[str, ToldWorker]]:
    found = [(agent, worker) for agent, each in told.items() for worker in each.told.workers]
    return sorted(found, key=lambda each: int(each[1].worker[1:]))


def _newest(workers: Sequence[ToldWorker]) -> GenerationId | None:
    ids = [each.generation for each in workers if each.generation is not None]
    return max(ids, key=lambda id: (id.run_id, id.number), default=None)


def _former(workers: Sequence[ToldWorker], newest: GenerationId | None) -> list[ToldWorker]:
    """Return the workers of older generations of the same run."""
    return [
        each
        for each in workers
        if each.generation is not None
        and newest is not None
        and each.generation != newest
        and each.generation.run_id == newest.run_id
        and not each.has_left
    ]


def _agents(job: Job, told: Mapping[str, ToldAgent], members: Sequence[ToldWorker]) -> dict[str, AgentRecord]:
    """Return the agents, those of the lowest ranks first."""
    ranks = {each.worker: each.rank for each in members}

    def lowest_rank(agent: str) -> int:
        return min((ranks.get(each.worker, len(ranks)) for each in told[agent].told.workers), default=len(ranks))

    return {
        agent: AgentRecord(agent, told[agent].hello.host, told[agent].hello.slots, order)
        for order, agent in enumerate(sorted(told, key=lowest_rank), len(job.first_hosts))
    }


def _worker(job: Job, agent: str, told: ToldWorker, newest: GenerationId | None, now_s: float) -> Worker:
    is_of_run = told.generation is not None and newest is not None and told.generation.run_id == newest.run_id
    return Worker(
        told.worker,
        Slot(agent, told.slot),
        address=told.address,
        pid=told.pid,
        is_elastic=told.is_elastic,
        elastic_s=now_s if told.is_elastic else None,
        ready=told.ready,
        synced=told.synced if is_of_run else 0,
        stepped=told.stepped,
        finished=told.finished,
        shortfall=told.shortfall,
        static_because=told.static_because,
        has_left=told.has_left,
        raised=told.raised or None,
        kill_at_s=now_s + job.config.grace_s if told.raised else None,
        has_met=told.has_met,
    )


def _far_above(number: int) -> int:
    return (number // _AHEAD + 1) * _AHEAD
