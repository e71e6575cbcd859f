"""The quarantine of hosts where workers are lost, permanent or for a cooldown. Only with --on-failure host."""

from __future__ import annotations

import zlib

from farandole.coordinator import slots
from farandole.coordinator.job import Ban, Job
from farandole.coordinator.transition import Transition
from farandole.events import HostBlacklisted, HostCooledDown


def take_out(transition: Transition, host: str) -> list[str]:
    """Ban the host, close its slots and stop its workers, which no longer count as survivors. Return the members among
    them. A host that is no longer offered is left anyway and is not banned."""
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
    """Return how long a host is banned after its latest failure, in seconds; None: for ever.

    As in Horovod: twice the shortest time, doubled by each further failure, and up to once the shortest time more, so
    that hosts do not all come back at the same time; never outside the range.
    """
    if job.config.cooldown_range_s is None:
        return None
    low, high = job.config.cooldown_range_s
    more = zlib.crc32(f"{job.job_id} {host} {failures}".encode()) / 2**32
    return max(low, min(high, low * (2.0 ** min(failures, 64) + more)))


def let_back(transition: Transition) -> None:
    """Let the job use hosts again whose ban is over."""
    for host, ban in transition.job.bans.items():
        if not ban.is_over and ban.until_s is not None and transition.now_s >= ban.until_s:
            transition.change(bans={**transition.job.bans, host: Ban(ban.failures, ban.until_s, is_over=True)})
            transition.log(HostCooledDown(host))


def deadline(job: Job) -> float | None:
    """Return when the next ban ends."""
    return min((ban.until_s for ban in job.bans.values() if ban.until_s is not None and not ban.is_over), default=None)
