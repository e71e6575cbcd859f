"""The hosts of a job, and what is not used for a while since workers were lost there: hosts that are banned, slots in
backoff. Pure.
"""

from __future__ import annotations

import signal
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace

from farandole.base.events.host_events import (
    AgentJoined,
    HostAdded,
    HostBlacklisted,
    HostCooledDown,
    HostDrained,
    HostRemoved,
    HostUndrained,
)
from farandole.base.events.worker_events import SlotBackoff
from farandole.base.wire.messages import Dismissed
from farandole.job.coordinator import capacity
from farandole.job.coordinator.job import AgentRecord, Ban, Job, Offer, Slot, Worker
from farandole.job.coordinator.transition import AgentConnected, HostsOffered, Transition


def agent_connected(transition: Transition, input: AgentConnected) -> None:
    """Add an agent. A lost agent may come back: it has ended its old workers, so its slots are empty."""
    agents, offers = transition.job.agents, transition.job.offers
    known = agents.get(input.agent)
    if (known is not None and known.is_connected) or input.slots < 0:
        return
    if known is not None:
        order = known.order
    elif input.host in transition.job.first_hosts:
        order = transition.job.first_hosts[input.host].order
    else:
        order = len(transition.job.first_hosts) + len(agents)
    agent = AgentRecord(input.agent, input.host, input.slots, order)
    if offers is not None:
        offer = offers.get(input.host, Offer(0, agent.order))
        agent = replace(agent, slots=offer.slots, order=offer.order)
    transition.change(agents={**agents, agent.name: agent})
    transition.log(AgentJoined(agent.name, agent.host, agent.slots))


def hosts_offered(transition: Transition, input: HostsOffered) -> None:
    """Update the offered hosts. Hosts keep the order in which they were first offered, so that the remaining hosts keep
    the order of their ranks."""
    job = transition.job
    old, before = job.offers or {}, _slots_by_host(job)
    new = _in_order(old, input.slots, job.offered)
    transition.change(offers=new, may_get_hosts=input.may_change, offered=job.offered + len(new.keys() - old.keys()))
    for agent in job.agents.values():
        offer = new.get(agent.host, Offer(0, agent.order))
        transition.change_agent(agent.name, slots=offer.slots, order=offer.order)
    for host in dict.fromkeys((*before, *new)):
        count = new[host].slots if host in new else 0
        if count > before.get(host, 0) and job.offers is not None:
            transition.log(HostAdded(host, count, before.get(host, 0)))
        elif count < before.get(host, 0) and not job.is_released:
            _withdraw(transition, host, count)
    capacity.follow_hosts(transition)
    _take_back(transition)


def drain_host(transition: Transition, host: str, reason: str) -> None:
    """Drain a host: its members leave at the next boundary, without loss of work, and no further workers are started
    there. The job still wants as many workers: other hosts with free slots get them. The host's agents are dismissed
    when they are idle; an agent that joins again later counts as new.

    reason  what happened, as in "host b is drained: `reason`"
    """
    _drain(transition, [agent for agent in transition.job.agents.values() if agent.host == host], reason)


def undrain_host(transition: Transition, host: str) -> None:
    """Let the job use the host again. Members that have not left yet stay if they are wanted. If the host's agents are
    gone, the launcher of a job on this machine starts others when it receives this order."""
    drained = [agent for agent in transition.job.agents.values() if agent.host == host and agent.is_draining]
    for agent in drained:
        transition.change_agent(agent.name, is_draining=False)
    if drained:
        transition.log(HostUndrained(host))
        capacity.follow_hosts(transition)
        _take_back(transition)


def agent_leaves(transition: Transition, name: str, reason: str) -> None:
    """Drain the slots of one agent that was asked to end, for example by a preemption notice."""
    _drain(transition, [agent for agent in transition.job.agents.values() if agent.name == name], reason)


def dismiss_idle(transition: Transition) -> None:
    """Dismiss the drained agents, and the agents of hosts that are no longer offered, that have no workers left."""
    job = transition.job
    busy = {worker.slot.agent for worker in job.workers.values()}
    for agent in job.agents.values():
        is_offered = job.offers is None or agent.host in job.offers
        if agent.is_connected and (agent.is_draining or not is_offered) and agent.name not in busy:
            why = "is drained" if agent.is_draining else "is no longer offered"
            transition.send(agent.name, Dismissed(f"host {agent.host} {why}", is_drained=agent.is_draining))
            transition.change_agent(agent.name, is_connected=False)


def _drain(transition: Transition, agents: Iterable[AgentRecord], reason: str) -> None:
    for agent in agents:
        if not agent.is_connected or agent.is_draining or transition.job.is_released:
            continue
        transition.change_agent(agent.name, is_draining=True)
        slots = [slot for slot in transition.job.slots if slot.agent == agent.name]
        going = _vacate(transition, slots, f"host {agent.host} is drained")
        transition.log(HostDrained(agent.host, reason, going))


def _vacate(transition: Transition, slots: Iterable[Slot], reason: str) -> tuple[str, ...]:
    """Let the workers of these slots, which may not be used any more, leave. Return their names."""
    going, occupants = [], capacity.workers_by_slot(transition.job)
    for slot in slots:
        worker = capacity.vacate_slot(transition, slot, occupants.get(slot), reason)
        transition.change_slot(slot, is_given_up=False)
        going += [worker] if worker is not None else []
    return tuple(going)


def _slots_by_host(job: Job) -> dict[str, int]:
    """Return the slots of the hosts offered so far; until hosts are offered, the slots that agents offer."""
    if job.offers is not None:
        return {host: offer.slots for host, offer in job.offers.items()}
    return {agent.host: agent.slots for agent in sorted(job.agents.values(), key=lambda agent: agent.slots)}


def _in_order(old: Mapping[str, Offer], slots_of: Mapping[str, int], offered: int) -> dict[str, Offer]:
    new: dict[str, Offer] = {}
    for host, count in slots_of.items():
        if count > 0 and host in old:
            new[host] = Offer(count, old[host].order)
        elif count > 0:
            new[host] = Offer(count, offered)
            offered += 1
    return dict(sorted(new.items(), key=lambda item: item[1].order))


def _withdraw(transition: Transition, host: str, left: int) -> None:
    """Keep only the first `left` slots of each agent of the host."""
    job = transition.job
    slots = [slot for slot in job.slots if job.host(slot) == host and slot.index >= left]
    transition.log(HostRemoved(host, left, _vacate(transition, slots, f"host {host} is no longer offered")))


def _take_back(transition: Transition) -> None:
    """Keep members that were to leave with their host, and have not left yet, when the host is offered again."""
    job = transition.job
    for worker in sorted(job.survivors(), key=job.slot_order):
        agent = job.agents[worker.slot.agent]
        is_offered = worker.slot.index < agent.slots and not (agent.is_draining or job.is_banned(agent.host))
        if worker.is_leaving and not worker.was_asked and is_offered and capacity.wants_more(transition.job):
            transition.change_worker(worker.name, is_leaving=False)
            transition.change_slot(worker.slot, is_open=True)


# Quarantine: with --on-failure host, a host where a worker is lost is banned, for ever or for a cooldown --------------


def quarantine_host(transition: Transition, host: str) -> list[str]:
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
        capacity.close_slot(transition, slot)
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


def end_quarantines(transition: Transition) -> None:
    for host, ban in transition.job.bans.items():
        if not ban.is_over and ban.until_s is not None and transition.now_s >= ban.until_s:
            transition.change(bans={**transition.job.bans, host: Ban(ban.failures, ban.until_s, is_over=True)})
            transition.log(HostCooledDown(host))


def quarantine_deadline(job: Job) -> float | None:
    return min((ban.until_s for ban in job.bans.values() if ban.until_s is not None and not ban.is_over), default=None)


# Backoff: a broken device must not cost the others a regroup every few seconds ----------------------------------------
#
# A healthy worker is always replaced at once: a worker that lived for HEALTHY_S inside its elastic function, or that
# held the state and was killed by SIGKILL, which its own code never does. The first unhealthy worker is replaced at
# once, too. From the second in a row on the slot stays empty for FIRST_BACKOFF_S, then for twice as long with each
# further one, up to LONGEST_BACKOFF_S.

HEALTHY_S = 1.0
FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 60.0


def backoff_s(failures: int) -> float:
    """Return how long, in seconds, a slot stays empty after this many failures in a row."""
    return 0.0 if failures < 2 else min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failures - 2, 30))


def count_failure(transition: Transition, worker: Worker, exit_code: int | None) -> None:
    """Count the loss of a slot's worker that was not asked to leave. A failure of the host does not count against the
    slot."""
    job, slot = transition.job, worker.slot
    use = job.slots.get(slot)
    if use is None or not use.is_open or not job.agents[slot.agent].is_connected:
        return
    if _was_healthy(worker, exit_code, transition.now_s):
        transition.change_slot(slot, failures=0)
        return
    failures = use.failures + 1
    transition.change_slot(slot, failures=failures)
    if (pause := backoff_s(failures)) and use.restarts < job.config.restarts:
        transition.change_slot(slot, backoff_until_s=transition.now_s + pause)
        transition.log(SlotBackoff(slot.index, job.host(slot), failures, pause))


def _was_healthy(worker: Worker, exit_code: int | None, now_s: float) -> bool:
    if worker.elastic_s is None:
        return False
    was_killed = exit_code == -signal.SIGKILL and not worker.killed_for
    return now_s - worker.elastic_s >= HEALTHY_S or (was_killed and worker.synced > 0)


def end_backoffs(transition: Transition) -> None:
    for slot, use in transition.job.slots.items():
        if use.backoff_until_s is not None and transition.now_s >= use.backoff_until_s:
            transition.change_slot(slot, backoff_until_s=None)


def backoff_deadline(job: Job) -> float | None:
    return min((use.backoff_until_s for use in job.slots.values() if use.backoff_until_s is not None), default=None)
