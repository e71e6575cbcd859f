"""Hosts where workers are lost are out, for ever or until they have cooled down. Only with --on-failure host."""

from __future__ import annotations

import zlib

from farandole.coordinator import slots
from farandole.coordinator.job import Ban, Job
from farandole.coordinator.transition import Transition
from farandole.events import HostBlacklisted, HostCooledDown


def take_out(transition: Transition, host: str) -> list[str]:
    """The host is out, its slots are closed, and its workers are stopped: they are survivors no longer. Gives the
    members among them. A host that is no longer offered is left anyway: nothing is held against it."""
    job = transition.job
    if job.is_banned(host) or (job.offers is not None and host not in job.offers):
        return []
    failures = job.bans[host].failures + 1 if host in job.bans else 1
    cooldown_s = cooldown(job, host, failures)
    until_s = None if cooldown_s is None else transition.now_s + cooldown_s
    transition.change(bans={**job.bans, host: Ban(failures, until_s)})
    for slot in [slot for slot in job.slots if job.host(slot) == host]:
        slots.close(transition, slot)
    stopped = [worker for worker in job.workers.values() if job.host_of(worker) == host and not worker.has_left]
    for worker in stopped:
        transition.kill(worker.name, 0.0, f"another worker of host {host} was lost")
        if job.is_member(worker.name):
            transition.change_worker(worker.name, has_left=True)
    transition.log(HostBlacklisted(host, failures, cooldown_s, tuple(worker.name for worker in stopped)))
    return [worker.name for worker in stopped if job.is_member(worker.name)]


def cooldown(job: Job, host: str, failures: int) -> float | None:
    """How long a host is out after its latest failure, in seconds; None: for ever.

    As in Horovod: twice the shortest time, doubled by each further failure, and up to once the shortest time
    more, so that hosts do not come back all together; never outside the range.
    """
    if job.config.cooldown_range_s is None:
        return None
    low, high = job.config.cooldown_range_s
    more = zlib.crc32(f"{job.job_id} {host} {failures}".encode()) / 2**32
    return max(low, min(high, low * (2.0 ** min(failures, 64) + more)))


def let_back(transition: Transition) -> None:
    """Hosts whose time is over may be used again."""
    for host, ban in transition.job.bans.items():
        if not ban.is_over and ban.until_s is not None and transition.now_s >= ban.until_s:
            transition.change(bans={**transition.job.bans, host: Ban(ban.failures, ban.until_s, is_over=True)})
            transition.log(HostCooledDown(host))


def deadline(job: Job) -> float | None:
    """When the next host may come back."""
    return min((ban.until_s for ban in job.bans.values() if ban.until_s is not None and not ban.is_over), default=None)
