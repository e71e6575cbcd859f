"""Spares: workers beyond the training ones. They wait, READY for any generation, until a member is lost. Pure.

A spare is a newcomer for which there is no rank yet. No worker is a spare by name: when a generation starts with as
many members as the job wants, the remaining newcomers wait on. So a loss and its replacement are one regroup, and the
worker that is started in the lost worker's slot is the next spare.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from farandole.coordinator import capacity
from farandole.coordinator.job import Job, Worker
from farandole.coordinator.transition import Transition
from farandole.events import SparesMissing, SpareWaits


def slots_wanted(job: Job) -> int:
    """Return in how many slots the job wants to have a worker. A script that has not entered an elastic function cannot
    admit workers: until then no spare is started, since it would slow down the start of the others."""
    return job.target + (job.spares if job.is_elastic else 0)


def most_members(job: Job) -> int | None:
    """Return the largest number of members that the next generation may reach by admitting newcomers; None: any
    number."""
    most = job.config.max_np
    if not job.config.spares:
        return most
    # To avoid an end for lack of workers, members that were asked to leave are replaced as well.
    wanted = max(job.target, job.config.min_np)
    return wanted if most is None else min(most, wanted)


def admitted(job: Job, staying: Sequence[Worker], room: int) -> list[Worker]:
    """Return the newcomers that the next generation admits, at most `room`. Each is taken from the host that has the
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
    """Report a newcomer that has no rank among the members and waits."""
    job = transition.job
    staying = [member for member in job.survivors() if not member.is_leaving]
    is_full = job.change is None and len(staying) >= job.target
    if job.spares and is_full and not job.is_member(worker.name):
        transition.log(SpareWaits(worker.name, worker.slot.index, job.host_of(worker)))


def warn_of_missing(transition: Transition) -> None:
    """Warn, once, that there is no slot for some of the spares."""
    job = transition.job
    if not (job.is_elastic and job.spares) or job.is_released:
        return
    missing = min(job.spares, max(0, slots_wanted(job) - capacity.worker_capacity(job)))
    if missing > job.missing_spares:
        transition.log(SparesMissing(job.spares, missing))
    transition.change(missing_spares=missing)
