"""Spares: workers beyond those that train. They wait, READY for any generation, until a member is lost. Pure.

A spare is a newcomer like any other, for which there is no place yet. Nobody is a spare by name: when a generation
starts with as many members as the job wants, the newcomers that are left over wait on. So a loss and its replacement
are one regroup, and the worker that is started in the lost one's slot is the next spare.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from farandole.coordinator import capacity
from farandole.coordinator.job import Job, Worker
from farandole.coordinator.transition import Transition
from farandole.events import SparesMissing, SpareWaits


def slots_wanted(job: Job) -> int:
    """How many slots the job wants to have a worker in. A script that has not entered an elastic function cannot take
    anybody in: until then no spare is started, which would slow the start of the others down."""
    return job.target + (job.spares if job.is_elastic else 0)


def most_members(job: Job) -> int | None:
    """The most members that the next generation may get by taking newcomers in; None: any number."""
    most = job.config.max_np
    if not job.config.spares:
        return most
    # Rather than to end for want of workers, also those are replaced that were asked to leave.
    wanted = max(job.target, job.config.min_np)
    return wanted if most is None else min(most, wanted)


def admitted(job: Job, staying: Sequence[Worker], room: int) -> list[Worker]:
    """The newcomers that the next generation takes in, at most `room`: one after the other of the host that has the
    fewest members, so that the loss of a host costs as few as possible."""
    waiting, chosen = job.candidates(), list[Worker]()
    members = Counter(job.host_of(worker) for worker in staying)
    while waiting and len(chosen) < room:
        best = min(waiting, key=lambda worker: members[job.host_of(worker)])  # the first slot among equals
        waiting.remove(best)
        chosen.append(best)
        members[job.host_of(best)] += 1
    return sorted(chosen, key=job.slot_order)


def tell_of(transition: Transition, worker: Worker) -> None:
    """Tell people of a newcomer that has no place among the members, and waits."""
    job = transition.job
    staying = [member for member in job.survivors() if not member.is_leaving]
    is_full = job.change is None and len(staying) >= job.target
    if job.spares and is_full and not job.is_member(worker.name):
        transition.log(SpareWaits(worker.name, worker.slot.index, job.host_of(worker)))


def warn_of_missing(transition: Transition) -> None:
    """Tell people, once, that there is no slot for some of the spares."""
    job = transition.job
    if not (job.is_elastic and job.spares) or job.is_released:
        return
    missing = min(job.spares, max(0, slots_wanted(job) - capacity.worker_capacity(job)))
    if missing > job.missing_spares:
        transition.log(SparesMissing(job.spares, missing))
    transition.change(missing_spares=missing)
