"""Hang detection from the worker statuses that agents report, and the response to stalled steps. Pure.

A step needs all members: while one of them hangs, each of the others comes to wait for it. So it is enough to detect
the moment after which no member makes progress.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from farandole.base.events import CollectiveStalled, LinksDistrusted, StallNoticed, WorkersHung
from farandole.base.membership import LONGEST_BETWEEN_S, Phase, WorkerStatus
from farandole.base.wire.messages import LinkBroken, Probe, Probed
from farandole.job.coordinator import regroup
from farandole.job.coordinator.inputs import StepsStalled
from farandole.job.coordinator.job import Finding, Job, LinkTrouble, StepStall, Worker
from farandole.job.coordinator.sentences import listed
from farandole.job.coordinator.transition import Transition

NOTICE_S = 60.0
"""Seconds after which, without a step timeout, the workers that block the others are named, once in a generation."""


class HangDetector:
    """`step_timeout_s`: the longest time without progress of any member; None: unlimited, but a stall is reported.

    Attributes:
        look_every_s: How often to look: the start of a stall is known so exactly.
        heartbeat_s: The time between two heartbeats of an agent, which contain the statuses.
    """

    def __init__(self, step_timeout_s: float | None) -> None:
        self._timeout_s = step_timeout_s
        self._limit_s = NOTICE_S if step_timeout_s is None else step_timeout_s
        self.look_every_s = self._limit_s / 20
        self.heartbeat_s = 0.0
        self._noticed: object = None  # the generation in which a stall was reported
        self._seen: dict[str, Mapping[str, WorkerStatus]] = {}  # by agent
        self._received_s: dict[str, float] = {}
        self._state: object = None
        self._since_s = 0.0

    def record(self, agent: str, workers: Mapping[str, WorkerStatus], now_s: float) -> None:
        """Record the statuses that an agent reports of all its workers."""
        self._seen[agent], self._received_s[agent] = workers, now_s

    def forget(self, agent: str) -> None:
        self._seen.pop(agent, None)
        self._received_s.pop(agent, None)

    def steps(self) -> dict[str, int]:
        """Return, by worker, how many steps it had decided when it was last seen."""
        return {name: each.step for workers in self._seen.values() for name, each in workers.items()}

    def look(self, job: Job, now_s: float) -> StepsStalled | None:
        """Return a StepsStalled input if no member has made progress for too long, and again after the same time. Call
        it regularly.

        Nothing is known, and so no stall is reported, while a member has not entered its elastic function yet, or has
        not been seen lately.
        """
        members = job.survivors()
        if not members or job.is_released or job.ending is not None:
            self._state = None
            return None
        statuses: dict[str, WorkerStatus] = {}
        fresh_s = 1.25 * LONGEST_BETWEEN_S + self.heartbeat_s
        for member in members:
            agent = member.slot.agent
            status = self._seen.get(agent, {}).get(member.name)
            if status is None or not member.is_elastic or now_s - self._received_s[agent] > fresh_s:
                self._state = None
                return None
            statuses[member.name] = status
        state = (job.number, job.generation, statuses)
        if state != self._state:
            self._state, self._since_s = state, now_s
        stalled_s = now_s - self._since_s
        if stalled_s < self._limit_s:
            return None
        own_code = (Phase.USER, Phase.OUTSIDE)
        waiting = tuple(name for name, status in statuses.items() if status.phase not in own_code)
        if self._timeout_s is None:
            if not waiting or self._noticed == job.number:  # long steps are not a stall
                return None
            self._noticed = job.number
        self._since_s = now_s
        return StepsStalled(
            number=job.number,
            stalled_s=stalled_s,
            step=max(status.step for status in statuses.values()),
            in_own_code=tuple(name for name, status in statuses.items() if status.phase in own_code),
            waiting=waiting,
        )


# The response to stalled steps; without --step-timeout a stall is only reported ---------------------------------------
#
# some are in their own code, the others wait   the former hang: they are stopped, with the stacks of their threads
# all wait for each other                       a new generation with the same members, twice; then the job ends
# all are in their own code                     the job ends, with the stacks of all: no worker is known to be healthy

MOST_RETRIES = 2


def steps_stalled(transition: Transition, input: StepsStalled) -> None:
    """Respond to steps that have stalled, unless the membership has changed meanwhile."""
    job = transition.job
    if not job.is_elastic or job.is_released or job.generation is None or input.number != job.number:
        return
    if transition.faults:
        return
    members = {worker.name: worker for worker in job.survivors()}
    hung = [name for name in input.in_own_code if name in members]
    if members.keys() != {*input.in_own_code, *input.waiting}:
        return
    if job.config.step_timeout_s is None:
        transition.log(StallNoticed(input.step, input.in_own_code, input.waiting, input.stalled_s))
        return
    how_long = f"{input.stalled_s:.0f} s (--step-timeout {job.config.step_timeout_s:g})"
    if hung and input.waiting:
        hung = [name for name in hung if not members[name].killed_for]
        if hung:
            transition.log(WorkersHung(input.step, tuple(hung), input.stalled_s))
        for name in hung:
            transition.kill(name, 0.0, f"the other workers have waited for it for {how_long}", dumps_stacks=True)
    elif hung:
        transition.end(
            1,
            f"No worker has made progress for {how_long}, and none of them waits for another one: "
            f"{listed(hung)} are in their own code. If a step may take that long, increase --step-timeout.",
            dumps_stacks=True,
        )
    elif job.change is None or job.change.is_planned:
        _all_wait(transition, input, how_long)


def _all_wait(transition: Transition, input: StepsStalled, how_long: str) -> None:
    """Respond to members that all wait: they are in different collectives, or a connection between them is broken."""
    before = transition.job.stall
    times = before.times + 1 if before is not None and before.step == input.step else 1
    transition.change(stall=StepStall(input.step, times))
    transition.log(CollectiveStalled(input.step, input.waiting, input.stalled_s))
    if times <= MOST_RETRIES:
        transition.faults.append(f"all workers have waited for each other for {how_long}")
        return
    transition.end(
        1,
        f"All workers have waited for each other for {how_long}, {times} times at the same step: check that all of "
        "them call the same collectives in the same order.",
        dumps_stacks=True,
    )


# Broken links between living workers: their reports, and the probes that find the side at fault -----------------------


# Time in seconds within which an exit explains a failed connection: the kernel needs up to 150 ms to tear down the
# memory of a worker before its exit is seen.
EXIT_EXPLAINS_S = 0.5


def link_broken(transition: Transition, reporter: Worker, hint: LinkBroken) -> None:
    """Remember a report about the running generation; an abort, or the loss of one of the two workers, explains it.

    A static script cannot regroup: there the failed collective raises, which ends the reporter soon enough.
    """
    job = transition.job
    is_running = job.is_elastic and not job.is_released and (job.change is None or job.change.is_planned)
    if job.generation is None or hint.number != job.generation.number or not is_running:
        return
    if hint.peer == reporter.name or not (job.is_survivor(hint.peer) and job.is_survivor(reporter.name)):
        return
    trouble = job.links
    deadline_s = transition.now_s + EXIT_EXPLAINS_S if trouble.deadline_s is None else trouble.deadline_s
    link = (min(reporter.name, hint.peer), max(reporter.name, hint.peer))
    left = {**trouble.left, reporter.name: hint.detail} if hint.direction == "left" else trouble.left
    transition.change(links=replace(trouble, hints=trouble.hints | {link}, left=left, deadline_s=deadline_s))


def judge_links(transition: Transition) -> None:
    """Act on links that are proved to be broken, and on reports that no exit has explained in time."""
    verdict_s = transition.job.links.verdict_s
    if verdict_s is not None and transition.now_s >= verdict_s:
        _stop_for_broken(transition)
    if transition.job.links.verdict_s is None:
        _judge_hints(transition)


def next_judgement(job: Job) -> float | None:
    """Return when `judge` has to run next."""
    trouble = job.links
    return trouble.deadline_s if trouble.verdict_s is None else trouble.verdict_s


def _stop_for_broken(transition: Transition) -> None:
    job = transition.job
    ending = _ending(job)
    broken = [link for link in broken_links(job, transition.now_s) if ending.isdisjoint(link)]
    links = spread_to_hosts(job, broken, transition.now_s)
    cover = cover_but_one_holder(job, links)
    if cover:
        transition.change(links=LinkTrouble(retries=job.links.retries))  # the exits lead to a regroup for all
        _stop(transition, broken, cover, is_proved=True)
    else:
        # All links work again; but a worker that reported a failed connection waits for an order.
        transition.change(links=replace(job.links, findings={}, asked=frozenset(), verdict_s=None))


def _stop(transition: Transition, links: Collection[tuple[str, str]], cover: Sequence[str], is_proved: bool) -> None:
    named = tuple(f"{one}-{other}" for one, other in sorted(links))
    number = transition.job.generation.number if transition.job.generation else 0
    between = tuple(where for link in sorted(links) if (where := _between_hosts(transition.job, *link)))
    transition.log(LinksDistrusted(number, named, tuple(cover), is_proved, between))
    how = "were broken" if is_proved else "kept failing"
    for name in cover:
        transition.kill(name, 0.0, f"its connections {how} ({', '.join(named)})")


def _between_hosts(job: Job, one: str, other: str) -> str:
    """Return where the two workers can be reached, if they are on different hosts; otherwise nothing."""
    ends = [job.workers[one], job.workers[other]]
    hosts = [job.host_of(end) for end in ends]
    if hosts[0] == hosts[1]:
        return ""
    return " and ".join(f"{end.name} on {host} at {end.address}" for end, host in zip(ends, hosts, strict=True))


def _ending(job: Job) -> set[str]:
    """Return the workers whose code raised or that are being killed: they are about to exit, which explains their
    links."""
    return {worker.name for worker in job.survivors() if worker.raised or worker.killed_for}


def _judge_hints(transition: Transition) -> None:
    job = transition.job
    if job.links.deadline_s is None or transition.now_s < job.links.deadline_s:
        return
    proof_s = suspected_until(job, transition.now_s)
    if proof_s is not None and transition.now_s < proof_s:
        transition.change(
            links=replace(job.links, deadline_s=proof_s)
        )  # the report of the other end is better than a new trial
        return
    if _ending(job):  # its exit leads to a regroup, and makes all others fail, one after the other
        transition.change(links=replace(job.links, deadline_s=transition.now_s + EXIT_EXPLAINS_S))
        return
    hints = job.links.hints
    named = tuple(f"{one}-{other}" for one, other in sorted(hints))
    if job.links.retries < MOST_RETRIES:
        transition.change(links=LinkTrouble(retries=job.links.retries + 1))
        left = [f"{name}: {why}" for name, why in sorted(job.links.left.items())]
        # The connections of those that have left fail at their neighbours.
        reason = "; ".join(left) or f"connections failed between living workers ({', '.join(named)})"
        regroup.abort(transition, reason)
    else:
        transition.change(links=LinkTrouble())
        _stop(transition, hints, cover_but_one_holder(job, hints), is_proved=False)


def cover_but_one_holder(job: Job, links: Collection[tuple[str, str]]) -> list[str]:
    """Return a smallest set of members that touches every link, preferably members without state and of high rank. One
    holder of the state always stays, at any cost in other members: without it the job would be lost."""
    members = job.survivors()
    by_worth = [worker.name for worker in sorted(members, key=lambda worker: worker.synced == 0)]
    cover = smallest_cover(links, by_worth)
    holders = [name for name in by_worth if job.workers[name].synced and not job.workers[name].killed_for]
    if not holders or not set(cover).issuperset(holders):
        return cover
    emergency_writer = holders[0]
    neighbours = {name for link in links if emergency_writer in link for name in link} - {emergency_writer}
    others = smallest_cover(
        [link for link in links if emergency_writer not in link and neighbours.isdisjoint(link)], by_worth
    )
    return sorted({*neighbours, *others}, key=by_worth.index)


def smallest_cover(links: Collection[tuple[str, str]], by_worth: Sequence[str]) -> list[str]:
    """Return a smallest set of workers that touches every link, preferably those late in `by_worth`.

    Exact for links of one ring, which form paths or a circle: a worker with a single link is spared and its neighbour
    is taken. Where all have more, the worker with the most links is taken.
    """
    worth = {name: place for place, name in enumerate(by_worth)}
    left, cover = set(links), []
    while left:
        degree = Counter(name for link in left for name in link)
        spared = [name for name in degree if degree[name] == 1]
        if spared:
            first = min(spared, key=lambda name: worth[name])
            taken = next(name for link in left if first in link for name in link if name != first)
        else:
            taken = max(degree, key=lambda name: (degree[name], worth[name]))
        cover.append(taken)
        left = {link for link in left if taken not in link}
    return sorted(cover, key=lambda name: worth[name])


# Probes prove which links between living workers are broken -----------------------------------------------------------
#
# A worker whose connection makes no progress, or has failed, tries to connect to its neighbours anew. That takes both
# directions and nothing but the two kernels: a busy peer answers, and so does a slow link. Still, the report of one
# worker proves nothing: the peer, or its host, may have died just now, which its agent handles. A link is broken when
# the workers at both its ends live and neither can reach the other.

LinkEnds = tuple[str, str]

_VERDICT_PARTS = 8
"""The part of the detection budget (1 / 8) for which the reports of the other members are awaited after a link is
proved to be broken: all broken links must be known, so that the fewest workers are stopped."""


def note_probe_result(transition: Transition, reporter: Worker, message: Probed) -> None:
    """Remember the probe results of a member of the running generation, and ask the other ends of links that seem
    broken."""
    job = transition.job
    is_running = job.is_elastic and not job.is_released and (job.change is None or job.change.is_planned)
    if job.generation is None or message.number != job.generation.number or not is_running:
        return
    if not job.is_survivor(reporter.name):
        return

    def living(names: Iterable[str]) -> frozenset[str]:
        return frozenset(name for name in names if name != reporter.name and job.is_survivor(name))

    finding = Finding(transition.now_s, living(message.reachable), living(message.unreachable))
    trouble = job.links
    asked = trouble.asked - {reporter.name}
    transition.change(links=replace(trouble, findings={**trouble.findings, reporter.name: finding}, asked=asked))
    if finding.unreachable or trouble.verdict_s is not None:  # else no link is suspected that was not before
        _ask_the_other_ends(transition, finding, message.number)
        _set_verdict(transition)


def broken_links(job: Job, now_s: float) -> list[LinkEnds]:
    """Return the links whose ends both live and cannot reach each other, by the ranks of their workers."""
    fresh = _fresh(job, now_s)
    ranks = job.generation.ranks if job.generation is not None else {}
    found = [
        (one, other)
        for one, finding in fresh.items()
        for other in finding.unreachable
        if job.is_survivor(one) and job.is_survivor(other) and ranks[one] < ranks[other] and _denies(fresh, other, one)
    ]
    return sorted(found, key=lambda link: (ranks[link[0]], ranks[link[1]]))


def suspected_until(job: Job, now_s: float) -> float | None:
    """Return until when the other end of a link that seems broken may still confirm it; None: no worker is asked."""
    fresh = _fresh(job, now_s)
    times = [found.at_s for found in fresh.values() if found.unreachable - fresh.keys()]
    return max(times) + job.config.detection_budget_s / 2 if times else None


def spread_to_hosts(job: Job, broken: Iterable[LinkEnds], now_s: float) -> set[LinkEnds]:
    """Return the broken links, and the untried links between the same pairs of hosts: without them the next generation
    would have the same trouble with other workers."""
    members = job.survivors()
    host = {worker.name: job.host_of(worker) for worker in members}
    works = {
        frozenset((host[name], host[peer]))
        for name, found in _fresh(job, now_s).items()
        for peer in found.reachable
        if name in host and peer in host
    }
    links = set(broken)
    ways = {frozenset((host[one], host[other])) for one, other in links if host[one] != host[other]} - works
    members_on: defaultdict[str, list[int]] = defaultdict(list)  # by rank
    for rank, worker in enumerate(members):
        members_on[host[worker.name]].append(rank)
    for one, other in map(tuple, ways):
        for ends in itertools.product(members_on[one], members_on[other]):
            links.add((members[min(ends)].name, members[max(ends)].name))
    return links


def _set_verdict(transition: Transition) -> None:
    """Set the time of the verdict once a link is proved to be broken: now, if all members have reported."""
    job, trouble = transition.job, transition.job.links
    if not broken_links(job, transition.now_s):
        return
    fresh = _fresh(job, transition.now_s)
    have_all_reported = all(worker.name in fresh for worker in job.each_survivor())
    verdict_s = transition.now_s + (0.0 if have_all_reported else job.config.detection_budget_s / _VERDICT_PARTS)
    if trouble.verdict_s is None or verdict_s < trouble.verdict_s:
        transition.change(links=replace(trouble, verdict_s=verdict_s))


def _ask_the_other_ends(transition: Transition, finding: Finding, number: int) -> None:
    """Ask the workers at the other ends to probe. They may be busy and may not have noticed the failure."""
    trouble, fresh = transition.job.links, _fresh(transition.job, transition.now_s)
    silent = sorted(finding.unreachable - fresh.keys() - trouble.asked)
    if silent:
        transition.change(links=replace(trouble, asked=trouble.asked | set(silent)))
        transition.send_to_workers(silent, Probe(number))


def _fresh(job: Job, now_s: float) -> dict[str, Finding]:
    """Return the results that are not older than a detection budget: a link that was broken for a moment is not
    broken."""
    budget_s = job.config.detection_budget_s
    return {name: found for name, found in job.links.findings.items() if now_s - found.at_s <= budget_s}


def _denies(found: dict[str, Finding], one: str, other: str) -> bool:
    return one in found and other in found[one].unreachable


# Silent agents --------------------------------------------------------------------------------------------------------


class JobClock:
    """The time of the job, which stands still while the coordinator itself cannot run.

    All deadlines of the job are kept in this time. So no deadline passes, and no agent is found silent, because the
    coordinator's process was stopped or starved and left messages unread.
    """

    def __init__(self, read_s: Callable[[], float], tolerance_s: float) -> None:
        self._read_s, self._tolerance_s = read_s, tolerance_s
        self._stalled_s = 0.0
        self._due_s: float | None = None

    def now_s(self) -> float:
        return self._read_s() - self._stalled_s

    def continue_from(self, now_s: float) -> None:
        """Let it be `now_s` now: where the clock of another coordinator has stopped."""
        self._stalled_s = self._read_s() - now_s

    def expect_look(self, delay_s: float) -> None:
        """Announce that the coordinator will look again in `delay_s`."""
        self._due_s = self._read_s() + delay_s

    def notice_stall(self) -> float:
        """Return the seconds by which the expected look is late, when that is beyond the tolerance; else 0. From then
        on they are not counted. Call it before any judgement."""
        late_s = 0.0 if self._due_s is None else self._read_s() - self._due_s
        if late_s <= self._tolerance_s:
            return 0.0
        self._stalled_s += late_s
        self._due_s = self._read_s()
        return late_s


class Silence:
    """The time of the last message of each agent. A verdict takes two looks: in between, the event loop has read every
    socket, so a message that had arrived but was not read yet still counts."""

    def __init__(self, budget_s: float) -> None:
        self.look_every_s = budget_s / 20
        self._limit_s = budget_s - 2 * self.look_every_s
        self._received_s: dict[str, float] = {}
        self._suspects: set[str] = set()

    def __contains__(self, agent: str) -> bool:
        return agent in self._received_s

    def record(self, agent: str, now_s: float) -> None:
        self._received_s[agent] = now_s
        self._suspects.discard(agent)

    def forget(self, agent: str) -> None:
        self._received_s.pop(agent, None)
        self._suspects.discard(agent)

    def look(self, now_s: float) -> dict[str, float]:
        """Return the agents whose silence has lasted for about the budget (never more, if called as often as
        `look_every_s` says), and for how many seconds."""
        silent = {agent: now_s - received_s for agent, received_s in self._received_s.items()}
        silent = {agent: silent_s for agent, silent_s in silent.items() if silent_s >= self._limit_s}
        lost = {agent: silent_s for agent, silent_s in silent.items() if agent in self._suspects}
        self._suspects.update(silent)
        return lost
