"""The invariants of every decision of a coordinator. Used by simulated_job.py.

Keeps its own records, from inputs and actions alone, so that it shares no mistake with the observed code.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from farandole.base.config import JobConfig
from farandole.base.events.host_events import HostBlacklisted, HostDrained, HostUndrained
from farandole.base.events.job_events import JobBecameStatic, JobEnds, StateLost
from farandole.base.events.worker_events import AllWorkersRestart
from farandole.base.wire.control import AskScale, AskUndrain
from farandole.base.wire.link_messages import (
    Abort,
    Elastic,
    Failed,
    Finished,
    Hello,
    Leaving,
    Left,
    Prepare,
    Ready,
    Released,
    Start,
    Synced,
)
from farandole.base.wire.messages import (
    Dismissed,
    ForwardToWorkers,
    FromWorker,
    Kill,
    Spawn,
    SpawnFailed,
    StartWorkers,
    WorkerDying,
    WorkerExited,
)
from farandole.job.coordinator.transition import (
    Action,
    AgentConnected,
    AgentLost,
    AgentReported,
    HostsOffered,
    Input,
    Log,
    Outcome,
    SendAgent,
)


class MembershipInvariants:
    """Checks decisions. Call `watch` with the inputs of each decision, its actions, and the time. Raises AssertionError
    when a rule is broken."""

    def __init__(self, config: JobConfig) -> None:
        self._config = config
        self.slot_of: dict[str, tuple[str, int]] = {}  # of workers whose exit is not known
        self.members: tuple[str, ...] = ()
        self.number = 0
        self.announced = 0
        self.waited_for_leases = 0
        self.ended: Outcome | None = None
        self.failed_after_release = False
        self._hosts: dict[str, str] = {}
        self._told: dict[str, int] = {}  # newest ABORT or PREPARE sent to each worker
        self._ready: dict[str, int] = {}
        self._said_hello: set[str] = set()
        self._elastic: set[str] = set()
        self._holders: set[str] = set()
        self._was_synced = False
        self._left: set[str] = set()
        self._dying: set[str] = set()  # members reported as dying by a hint, where members are not needed any more then
        self.released = False
        self._leaving: set[str] = set()
        self._spawned: set[str] = set()
        self._spawns: Counter[tuple[str, int]] = Counter()
        self._reopenings = 0
        self._now_s = 0.0
        self._starts = 0
        self._is_ending = False
        self._offers: dict[str, int] | None = None
        self._bans: dict[str, float] = {}  # until when no worker may run on a host
        self._connected: set[str] = set()
        self._cut_off: dict[str, float] = {}  # until when unobserved workers may train
        self._draining: set[str] = set()  # agents on which no worker may be started
        # The number of wanted members, as far as it is visible from outside: at least, and at most.
        self._target = (0 if config.fills_slots else config.num_proc, config.max_np or config.num_proc)
        self._is_finishing = False
        self._failed: set[str] = set()
        self._killed: set[str] = set()
        self._just_elastic: set[str] = set()  # and that said so among these inputs
        self._just_gone: dict[str, tuple[str, int]] = {}  # workers that were lost among the inputs of this decision
        self.attempt = 0
        self.restarts_of_all = self.restarts_for_slots = 0
        self._is_restarting = False
        self._is_static = False  # the members have left the elastic function, and go on without it

    def is_banned(self, host: str) -> bool:
        return self._now_s < self._bans.get(host, 0.0)

    def watch(self, inputs: Sequence[Input], actions: list[Action], now_s: float) -> None:
        """Check one decision."""
        self._now_s = now_s
        self._just_gone.clear()
        self._just_elastic.clear()
        assert self.ended is None or actions == [], f"actions after the end: {actions}"
        to_blame = set()
        for happened in inputs:
            to_blame.add(self._host_to_blame(happened))
            self._hear(happened)
        starts: dict[str, Start] = {}
        self._is_ending |= any(isinstance(action, Log) and isinstance(action.event, JobEnds) for action in actions)
        for action in actions:
            assert self.ended is None, f"{action} after Outcome"
            if isinstance(action, SendAgent):
                match action.message:
                    case Spawn(worker, slot, _, attempt):
                        self._check_attempt(worker, attempt)
                        self._check_spawn(action.agent, worker, slot)
                    case ForwardToWorkers(workers, message):
                        for worker in workers:
                            self._check_told(action.agent, worker, message)
                    case StartWorkers(some):
                        assert all(self.slot_of[worker][0] == action.agent for worker in some)
                        starts |= some
                    case Kill(worker):
                        assert worker in self.slot_of or worker in self._just_gone, f"killing {worker}, which is gone"
                        self._killed.add(worker)
                    case Dismissed():
                        self._check_dismissed(action.agent)
            elif isinstance(action, Log) and isinstance(action.event, AllWorkersRestart):
                self._check_restart_of_all(action.event)
            elif isinstance(action, Log) and isinstance(action.event, JobBecameStatic):
                self._check_became_static(action.event)
            elif isinstance(action, Log) and isinstance(action.event, HostDrained):
                self._check_drained(action.event)
            elif isinstance(action, Log) and isinstance(action.event, HostUndrained):
                self._draining -= {agent for agent, host in self._hosts.items() if host == action.event.host}
            elif isinstance(action, Log) and isinstance(action.event, StateLost):
                assert self._was_synced, "a state was lost that nobody had"
                assert self._holders.intersection(self.members) <= self._left, "there is a holder"
                self._was_synced = False
            elif isinstance(action, Log) and isinstance(action.event, HostBlacklisted):
                self._check_ban(action.event)
            elif isinstance(action, Outcome):
                assert action.reason.strip().endswith("."), f"no whole sentence: {action.reason}"
                self.ended = action
        if starts:
            self._check_start(starts)
        for host in to_blame - {None}:
            if self._config.on_failure == "host" and not self._is_ending:
                assert self.is_banned(host), f"a member on {host} was lost, and the host is not out"

    def _hear(self, happened: Input) -> None:
        match happened:
            case HostsOffered(slots):
                self._offers = {host: count for host, count in slots.items() if count > 0}
                self._leaving |= {worker for worker in self.slot_of if self._is_withdrawn(worker)}
                self._reopenings += 1
            case AgentConnected(agent, host):
                self._hosts.setdefault(agent, host)
                if agent in self._draining - self._connected:
                    self._draining.discard(agent)
                    self._reopenings += 1
                self._connected.add(agent)
            case AgentLost(agent, _, lease_end_s):
                for worker, slot in self.slot_of.items():
                    if slot[0] == agent and lease_end_s is not None:
                        self._cut_off[worker] = lease_end_s
                self._connected.discard(agent)
                self._forget([worker for worker, slot in self.slot_of.items() if slot[0] == agent])
                self._reopenings += 1
            case AskScale(size):
                self._reopenings += 1
                most = self._config.max_np
                if self._config.min_np <= size and (most is None or size <= most) and not self._config.fills_slots:
                    self._target = (size, size)
            case AskUndrain(host):
                self._draining -= {agent for agent, of_agent in self._hosts.items() if of_agent == host}
                self._reopenings += 1
            case AgentReported(agent, WorkerExited(worker, code)) if self._is_with(worker, agent):
                if self.released and worker in self.members and code != 0:
                    self.failed_after_release = True
                self._forget([worker])
            case AgentReported(agent, WorkerDying(worker)) if self._is_with(worker, agent):
                is_elastic = bool(self._elastic.intersection(self.members)) and not self.released
                counts = is_elastic and self._config.on_failure == "slot" and not self._is_ending
                if counts and worker in self.members and worker not in self._left:
                    self._dying.add(worker)
            case AgentReported(agent, SpawnFailed(worker)) if self._is_with(worker, agent):
                self._forget([worker])
            case AgentReported(agent, FromWorker(worker, said)) if self._is_with(worker, agent):
                match said:
                    case Hello():
                        self._said_hello.add(worker)
                    case Elastic() if self.members:  # workers wait in init() until then
                        self._elastic.add(worker)
                        self._just_elastic.add(worker)
                    case Ready(number) if number == self._told.get(worker):
                        self._ready[worker] = number
                    case Synced(number) if (
                        number == self.number and worker in self.members and worker not in self._left | self._dying
                    ):
                        self._holders.add(worker)
                        self._was_synced = True
                    case Leaving():
                        self._reopenings += 1
                        if worker in self.members or self._config.spares == 0:
                            self._target = (max(0, self._target[0] - 1), self._target[1])
                        self._leaving.add(worker)
                    case Finished():
                        self._is_finishing = True
                    case Failed():
                        self._failed.add(worker)

    def _is_with(self, worker: str, agent: str) -> bool:
        return worker in self.slot_of and self.slot_of[worker][0] == agent

    def _host_to_blame(self, happened: Input) -> str | None:
        """Return the host that is banned after this input, if the job has that policy."""
        if not isinstance(happened, AgentReported) or not isinstance(happened.message, WorkerExited):
            return None
        worker = happened.message.worker
        was_member = worker in self.members and self._is_with(worker, happened.agent) and worker not in self._left
        host = self._hosts.get(happened.agent, "")
        is_ours = self._offers is None or host in self._offers
        is_elastic = bool(self._elastic.intersection(self.members)) and not self.released and not self._is_ending
        return host if was_member and is_ours and is_elastic else None

    def _check_ban(self, event: HostBlacklisted) -> None:
        limits = self._config.cooldown_range_s
        assert self._config.on_failure == "host"
        assert not self.is_banned(event.host), f"{event.host} is out already"
        if event.cooldown_s is None:
            assert limits is None
        else:
            assert limits is not None
            assert limits[0] <= event.cooldown_s <= limits[1]
        self._bans[event.host] = float("inf") if event.cooldown_s is None else self._now_s + event.cooldown_s
        self._left.update(worker for worker in event.workers if worker in self.members)

    def _check_dismissed(self, agent: str) -> None:
        if agent not in self._draining:
            assert self._offers is not None
            assert self._hosts[agent] not in self._offers, f"{agent} is dismissed though its host is offered"
        assert all(slot[0] != agent for slot in self.slot_of.values()), f"{agent} is dismissed and has workers"
        self._connected.discard(agent)

    def _check_drained(self, event: HostDrained) -> None:
        self._draining |= {agent for agent, host in self._hosts.items() if host == event.host}
        self._leaving.update(event.workers)
        slot_of = {**self._just_gone, **self.slot_of}
        assert all(self._hosts[slot_of[worker][0]] == event.host for worker in event.workers)

    def _forget(self, workers: list[str]) -> None:
        for worker in workers:
            if worker in self.slot_of:
                self._just_gone[worker] = self.slot_of.pop(worker)
            self._holders.discard(worker)

    def _check_restart_of_all(self, event: AllWorkersRestart) -> None:
        most = self._config.max_restarts
        assert most is not None, "all workers are restarted, which nobody asked for"
        if event.attempts is None:
            assert self._config.fills_slots, "a restart for more slots, which the job does not fill"
            assert event.workers > len(self.slot_of), "a restart for more slots that are not there"
            self.restarts_for_slots += 1
        else:
            self.restarts_of_all += 1
            assert event.attempts == most + 1
        assert self.restarts_of_all <= most, f"{self.restarts_of_all} restarts of all workers, of {most}"
        assert event.attempt == self.restarts_of_all + 1
        assert not self._is_restarting, "a second restart of all workers begins during the first one"
        were_elastic = self._elastic - self._just_elastic
        assert not were_elastic.intersection(self.members), "an elastic job needs no restart of all workers"
        self._is_restarting, self.members = True, ()

    def _check_became_static(self, event: JobBecameStatic) -> None:
        assert self.released, f"{event} before the members were released"
        assert set(event.workers) <= set(self.members)
        self._is_static, self._is_finishing, self._was_synced = True, False, False
        self._elastic -= set(self.members)

    def _check_attempt(self, worker: str, attempt: int) -> None:
        if self._is_restarting:
            if self._is_static:
                self._is_static = self.released = False
            assert not self.slot_of, f"{worker} is started beside {sorted(self.slot_of)} of the last attempt"
            twins = [each for each, until_s in self._cut_off.items() if self._now_s < until_s]
            assert not twins, f"{worker} is started beside {twins}, whose lease is not over"
            self._is_restarting, self.attempt = False, self.attempt + 1
            self._cut_off.clear()
        assert attempt == self.attempt, f"{worker} belongs to attempt {attempt} instead of {self.attempt}"

    def _check_spawn(self, agent: str, worker: str, slot: int) -> None:
        assert worker not in self._spawned, f"{worker} was used twice"
        assert (agent, slot) not in self.slot_of.values(), f"two workers in slot {slot} of {agent}"
        host = self._hosts[agent]
        assert not self.is_banned(host), f"{worker} was started on {host}, which is out"
        assert agent not in self._draining, f"{worker} was started on {agent}, which is drained"
        assert self._offers is None or slot < self._offers.get(host, 0), f"slot {slot} of {host} is not offered"
        self._spawned.add(worker)
        self.slot_of[worker] = (agent, slot)
        self._spawns[agent, slot] += 1
        budget = 1 + self._config.restarts + self._reopenings + self.attempt
        within = self._config.on_failure == "host" or self._spawns[agent, slot] <= budget
        assert within, f"slot {slot} of {agent} restarted too often"
        assert not self.released, f"{worker} was started after the release"

    def _check_told(self, agent: str, worker: str, message: object) -> None:
        may_be_gone = not isinstance(message, Abort | Prepare | Released)
        if may_be_gone and self._just_gone.get(worker, ("",))[0] == agent:
            return  # The answer to an input that came just before the end of the worker.
        assert self._is_with(worker, agent), f"{worker} is not with {agent} (any more): {message}"
        assert worker not in self._left or type(message).__name__ == "Stop", f"{worker} had left"
        if isinstance(message, Abort | Prepare):
            assert worker in self.members, f"{message} to {worker}, which is no member"
            assert worker not in self._dying, f"{message} to {worker}, which is dying"
            assert message.number > self.number, f"{message} is not above generation {self.number}"
            assert message.number > self._told.get(worker, 0), f"{worker} was told {message} before"
            self._told[worker] = message.number
            if isinstance(message, Prepare):
                assert message.update in (1, 2, 3), f"{message} does not say what changes"
                if self._config.spares and message.update == 2:
                    there = len([each for each in self.members if each in self.slot_of and each not in self._leaving])
                    # A single one may be about to leave, and transfer the state.
                    assert there < max(2, self._most_with_spares()), f"{message}, and no member is missing"
            self.announced = max(self.announced, message.number)
        elif isinstance(message, Released):
            assert worker in self.members, f"{worker} is released and is no member"
            assert message.number == self.number
            self.released = True
        elif isinstance(message, Left):
            # A member leaves only when it, too, is quiescent: its peers may still read the data that it sent.
            assert worker not in self.members or self._ready.get(worker) == self._told.get(worker)
            self._left.add(worker)

    def _check_start(self, starts: dict[str, Start]) -> None:
        by_rank = sorted(starts, key=lambda worker: starts[worker].placement.rank)
        ids = {start.id for start in starts.values()}
        assert len(ids) == 1, f"one START with different identities: {ids}"
        number = ids.pop().number
        assert number > self.number, f"generation {number} after {self.number}"
        assert number >= self.announced, f"generation {number} though {self.announced} was announced"
        for worker in by_rank:
            assert worker in self.slot_of, f"START to {worker}, which is gone"
            assert worker in self._said_hello, f"START to {worker}, which has no address"
            assert worker not in self._left, f"START to {worker}, which has left"
            assert worker not in self._dying, f"START to {worker}, which is dying"
            assert not self.is_banned(self._hosts[self.slot_of[worker][0]]), f"START to {worker}, whose host is out"
            if self.members:
                was_member = worker in self.members
                is_ready = self._ready.get(worker) == number if was_member else worker in self._elastic
                assert is_ready, f"START {number} to {worker}, which is not READY for it"
        for worker in self.members:
            is_gone = worker not in self.slot_of or worker in self._left | self._dying
            assert worker in starts or is_gone, f"{worker} forgotten"
        assert len(starts) >= (self._config.min_np if self.members else 1)
        # A leaving member may transfer the state to those that stay.
        most = self._config.max_np
        assert most is None or len(starts) <= most + bool(self._leaving.intersection(starts))
        assert not self._is_restarting, "a generation of workers that are being restarted"
        if not set(starts).intersection(self.members):
            twins = [worker for worker in self.members if self._now_s < self._cut_off.get(worker, 0.0)]
            assert not twins, f"generation {number} trains beside {twins}, whose lease is not over"
            leases = [self._cut_off[worker] for worker in self.members if worker in self._cut_off]
            self.waited_for_leases += bool(leases) and self._now_s <= max(leases) + 0.001
        if self._config.spares and self.members:
            self._check_spares(by_rank)
        self._starts += 1
        limit = self._config.reset_limit
        assert limit is None or self._starts <= 1 + limit, f"{self._starts - 1} resets"
        self._check_state(starts)
        self._check_places(by_rank, starts)
        survivors = [worker for worker in self.members if worker in starts]
        assert by_rank[: len(survivors)] == survivors or not self.members, "survivors must keep their order"
        self.number, self.members = number, tuple(by_rank)

    def _most_with_spares(self) -> int:
        return max(self._target[1], self._config.min_np)

    def _check_spares(self, by_rank: list[str]) -> None:
        """Check that no newcomer is admitted without a place, and that none is left waiting while there is one."""
        newcomers = [worker for worker in by_rank if worker not in self.members]
        hands_over = bool(self._leaving.intersection(by_rank)) or len(by_rank) == 2
        assert not newcomers or len(by_rank) <= self._most_with_spares() + hands_over, "a spare made the job too large"
        not_free = self._left | self._dying | self._failed | self._killed | self._leaving | set(by_rank)
        waiting = self._elastic.intersection(self.slot_of) - not_free
        if waiting and not self._is_finishing:
            assert len(by_rank) >= self._target[0], f"{waiting} waited, and the job went on with {by_rank}"

    def _is_withdrawn(self, worker: str) -> bool:
        agent, slot = self.slot_of[worker]
        return self._offers is not None and slot >= self._offers.get(self._hosts[agent], 0)

    def _check_state(self, starts: dict[str, Start]) -> None:
        bootstrap = {start.bootstrap for start in starts.values()}
        assert bootstrap == {not self._was_synced}, f"bootstrap={bootstrap} though was_synced={self._was_synced}"
        if self._was_synced:
            assert self._holders.intersection(starts), "a generation without a holder"

    def _check_places(self, by_rank: list[str], starts: dict[str, Start]) -> None:
        size = len(by_rank)
        local: defaultdict[str, list[str]] = defaultdict(list)
        for worker in by_rank:
            local[self._hosts[self.slot_of[worker][0]]].append(worker)
        across: defaultdict[int, list[int]] = defaultdict(list)
        for rank, worker in enumerate(by_rank):
            across[starts[worker].placement.local_rank].append(rank)
        has_twins = len(set(self._hosts.values())) < len(self._hosts)  # agents of one host number its slots together
        for mates in local.values():
            assert {starts[each].placement.local_rank for each in mates} == set(range(len(mates)))
        for rank, worker in enumerate(by_rank):
            start, mates = starts[worker], local[self._hosts[self.slot_of[worker][0]]]
            place, slot = start.placement, self.slot_of[worker][1]
            assert (place.rank, place.size) == (rank, size)
            assert place.local_size == len(mates)
            assert has_twins or slot >= len(mates) or place.local_rank == slot
            assert place.cross_size == len(across[place.local_rank])
            assert place.cross_rank == across[place.local_rank].index(rank)
            assert (start.previous.worker, start.previous.rank) == (by_rank[rank - 1], (rank - 1) % size)
            following = (rank + 1) % size
            assert (start.next.worker, start.next.rank) == (by_rank[following], following)
