"""Random schedules of faults through the coordinator's decisions: every rule holds, and all ends well."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial

import pytest

from farandole.base.config import JobConfig
from farandole.base.events.generation_events import LinksDistrusted
from farandole.base.events.host_events import HostDrained, HostUndrained
from farandole.base.events.worker_events import WorkerLost
from farandole.base.membership import DataAddress, Origin
from farandole.base.wire.control import AskDrain, AskScale, AskUndrain
from farandole.base.wire.link_messages import (
    Elastic,
    Failed,
    Finished,
    Hello,
    Leaving,
    LinkBroken,
    Probed,
    Ready,
    Synced,
    WorkerMessage,
)
from farandole.base.wire.messages import (
    AgentLeaving,
    AgentMessage,
    FromWorker,
    Heartbeat,
    SpawnFailed,
    WorkerDying,
    WorkerExited,
)
from farandole.job.coordinator.decide import decide
from farandole.job.coordinator.job import new_job
from farandole.job.coordinator.shutdown import STOPPED_EXIT_CODE
from farandole.job.coordinator.transition import (
    AgentConnected,
    AgentLost,
    AgentReported,
    HostsOffered,
    Input,
    StepsStalled,
    StopRequested,
    Tick,
)
from tests.support.membership_invariants import MembershipInvariants
from tests.support.simulated_job import Habits, SimulatedJob

SCHEDULES = int(os.environ.get("MEMBERSHIP_SCHEDULES", "800"))  # `make schedules` runs 8,000
HOSTS_SCHEDULES = SPARES_SCHEDULES = SCHEDULES
JOINING_SCHEDULES = SCHEDULES // 2
BATCH = 200
KEPT = 600  # as many of each kind are looked at again
LARGE_WORKERS = int(os.environ.get("LARGE_WORKERS", "256"))  # `make schedules`: 1,024
GATHERS_S = (0.0, 0.0, 0.001, 0.02, 0.3)  # each input alone, or those of so long together


def random_config(dice: random.Random) -> JobConfig:
    num_proc = dice.randint(1, 5)
    return JobConfig(
        num_proc=num_proc,
        min_np=dice.randint(1, num_proc) if dice.random() < 0.5 else 1,
        max_np=dice.choice([None, num_proc, num_proc + 1]),
        restarts=dice.choice([0, 1, 3]),
        elastic_timeout_s=30.0,
        start_timeout_s=20.0,
        step_timeout_s=5.0,
        deferred_restart_s=dice.choice([0.0, 0.05, 1.0]),
    )


def random_horovod_config(dice: random.Random) -> JobConfig:
    """The policies of Horovod's elastic jobs, in any combination."""
    base = random_config(dice)
    return replace(
        base,
        on_failure=dice.choice(["slot", "host", "host"]),
        cooldown_range_s=dice.choice([None, (0.3, 2.0), (1.0, 1.0)]),
        reset_limit=dice.choice([None, None, None, 1, 3]),
        fills_slots=dice.random() < 0.7,
        waits_for_newcomers=dice.random() < 0.7,
        elastic_timeout_s=10.0,
    )


def random_hosts(dice: random.Random) -> dict[str, int]:
    """Some of three hosts; now and then none."""
    names = dice.sample(["a", "b", "c"], dice.choice([0, 1, 1, 2, 2, 3]))
    return {name: dice.randint(1, 3) for name in names}


def random_habits(dice: random.Random) -> Habits:
    rough = dice.random() < 0.3
    return Habits(
        is_elastic=dice.random() < 0.95,
        agrees=dice.random() < 0.7,
        hangs=0.1 if rough else 0.0,
        crashes=0.05 if rough else 0.0,
        fails_late=0.05 if rough else 0.0,
        repeats=dice.choice([0.0, 0.0, 0.05, 0.3]),
        gathers_s=dice.choice(GATHERS_S),
    )


def random_origin(seed: int) -> Origin | None:
    """Every third job may go on from a checkpoint when all who held its state are lost."""
    return Origin(3, 0, has_checkpoint=True) if seed % 3 == 0 else None


def hurt(world: SimulatedJob) -> None:
    """One random fault, or a planned change."""
    dice, alive = world.random, world.alive()
    victim = dice.choice(alive) if alive else None
    kind = dice.randrange(100)
    if world.offered is not None and kind < 40:
        world.offer(random_hosts(dice))
    elif kind < 4:
        world.scale(dice.randint(1, 6))
    elif kind < 5:
        world.stop()
    elif kind < 7:
        world.lose_agent(dice.choice(["a", "b"]), dice.choice([None, 0.3, 3.0]))
    elif kind < 8:
        world.drain_agent(dice.choice(["a", "b"]))
    elif kind < 9:
        world.drain_host(dice.choice(["a", "b"]))
    elif kind < 10:
        world.undrain_host(dice.choice(["a", "b"]))
    elif kind < 11:
        for worker in alive:
            worker.fail("ValueError: on every rank")
    elif victim is None:
        return
    elif kind < 40:
        world.exit(victim, dice.choice([-9, -9, -9, -11, 0, 1, 3]))
    elif kind < 43:
        world.hang(victim)
    elif kind < 44:
        world.tell_that_all_wait()
    elif kind < 50:
        victim.fail("ValueError: only here", exits=dice.random() < 0.8)
    elif kind < 70:
        victim.leave()
    elif kind < 85:
        for peer in world.peers_of(victim)[:1]:
            world.bad_links.add(frozenset((victim.name, peer.name)))
            world.say(victim, LinkBroken(victim.current, peer.name, "send", "reset"))
    elif kind < 90:
        for peer in world.peers_of(victim)[:1]:
            world.silence(victim.name, peer.name, dice.uniform(0.1, 20.0))
    elif kind < 93:
        world.silence("a", "b", dice.uniform(0.1, 20.0))
    else:
        other = dice.choice(alive)
        world.say(victim, LinkBroken(dice.randint(0, 9), other.name, "send", "nothing of the kind"))


def random_world(seed: int, spares: int = 0) -> SimulatedJob:
    dice = random.Random(seed)
    config = replace(random_config(dice), spares=spares)
    world = SimulatedJob(config, seed, random_habits(dice), random_origin(seed))
    slots = world.job.config.num_proc + dice.randint(0, 2) + spares
    if dice.random() < 0.3:
        world.connect("a", (slots + 1) // 2)
        world.after(dice.uniform(0, 1), lambda: world.connect("b", slots // 2 + 1))
    else:
        world.connect("a", slots)
    for _ in range(dice.randint(0, 7)):
        # Faults come in bursts: the interesting ones hit a regroup that is under way.
        at_s = dice.uniform(0.2, 3.0)
        for _ in range(dice.randint(1, 3)):
            world.after(at_s, lambda: hurt(world))
            at_s += 10 ** dice.uniform(-4, -0.5)
    if dice.random() < 0.3:
        world.after(dice.uniform(1.0, 3.5), world.finish_training)
    return world


def random_hosts_world(seed: int, spares: int = 0) -> SimulatedJob:
    """Hosts come and go, and Horovod's policies hold."""
    dice = random.Random(seed)
    config = random_horovod_config(dice)
    config = replace(config, spares=spares, max_np=config.max_np or config.num_proc) if spares else config
    world = SimulatedJob(config, seed, random_habits(dice), random_origin(seed))
    world.offer(random_hosts(dice) | {"a": dice.randint(1, 3)}, may_change=dice.random() < 0.8)
    for _ in range(dice.randint(0, 7)):
        at_s = dice.uniform(0.0, 4.0)
        for _ in range(dice.randint(1, 3)):
            world.after(at_s, lambda: hurt(world))
            at_s += 10 ** dice.uniform(-4, -0.5)
    if dice.random() < 0.3:
        world.after(dice.uniform(1.0, 5.0), world.finish_training)
    return world


def random_joining_world(seed: int) -> SimulatedJob:
    """Agents of other machines join, are cut off, thaw and join again."""
    dice = random.Random(seed)
    config = replace(random_config(dice), takes_agents=True, elastic_timeout_s=10.0)
    origin = Origin(3, 0, has_checkpoint=True) if seed % 2 else None
    world = SimulatedJob(config, seed, random_habits(dice), origin)
    for agent in ("a", "b", "c"):
        world.after(dice.uniform(0.0, 1.5), partial(world.connect, agent, dice.randint(1, 3)))
    for _ in range(dice.randint(0, 5)):
        at_s = dice.uniform(0.2, 6.0)
        for _ in range(dice.randint(1, 3)):
            if dice.random() < 0.5:
                lease_s = dice.choice([None, 0.3, 3.0])
                world.after(at_s, partial(world.lose_agent, dice.choice(["a", "b", "c"]), lease_s))
            else:
                world.after(at_s, lambda: hurt(world))
            at_s += 10 ** dice.uniform(-4, -0.5)
    if dice.random() < 0.3:
        world.after(dice.uniform(1.0, 8.0), world.finish_training)
    return world


def random_spares_world(seed: int) -> SimulatedJob:
    """As the others, every second one with hosts that come and go; with one or two spares."""
    make = random_hosts_world if seed % 2 else random_world
    dice = random.Random(seed)
    world = make(seed, spares=dice.choice([1, 1, 2]))
    if dice.random() < 0.5:
        for index in range(world.job.config.spares):
            world.after(dice.uniform(0, 1), partial(world.connect, f"spare{index}", 1))
    return world


def check_at_rest(world: SimulatedJob) -> None:
    """Nothing moves and no deadline is set: the job has ended, or all who can train do, and nobody waits."""
    if world.end is not None:
        assert not world.job.workers or world.job.config.grace_s, "workers outlive the job"
        return
    job, generation = world.job, world.job.generation
    if all(worker.hangs for worker in world.alive()):
        return  # No worker ever called init(): for all the coordinator knows, a plain script at work.
    assert generation is not None, "neither started nor ended"
    assert job.change is None, f"a change that nobody completes: {job.change}"
    members = [world.workers[name] for name in generation.members]
    stuck_newcomers = [w for w in world.alive() if w.name not in generation.members and not w.hangs]
    if world.habits.is_elastic:
        assert all(each.is_alive and each.is_in(generation.number) for each in members)
        assert all(each.synced == generation.number for each in members)
        is_full = bool(job.config.spares) and len(members) >= max(job.target, job.config.min_np)
        assert job.recovery is None, "a recovery of which nobody is told"
        assert is_full or not stuck_newcomers, f"never admitted: {[w.name for w in stuck_newcomers]}"
        assert len(stuck_newcomers) <= job.config.spares, "more spares than were asked for"
        leaving = [worker for worker in job.workers.values() if worker.is_leaving]
        # A holder of the state stays on a host that is no longer there as long as there is nobody to hand it over to.
        may_come = any(w.hangs for w in world.alive()) or (job.may_get_hosts and not any(w.was_asked for w in leaving))
        waits = len(members) == len(leaving) == 1 and may_come
        assert not leaving or waits, "asked to leave, and never let go"
        assert waits or all(each.agent not in world.drained for each in world.alive()), "a drained host has workers"
        assert len(members) >= job.config.min_np
        if job.config.fills_slots:
            check_slots_are_filled(world, len(members))


def check_slots_are_filled(world: SimulatedJob, size: int) -> None:
    """By the world's own count, not the coordinator's; where nobody hangs, was asked away or used a budget up."""
    job, hosts = world.job, world.offered or {}
    left = world.draining | world.drained
    usable = sum(slots for host, slots in hosts.items() if host not in left and not world.invariants.is_banned(host))
    wanted = usable if job.most is None else min(usable, job.most)
    spent = job.config.on_failure == "slot" and any(use.restarts >= job.config.restarts for use in job.slots.values())
    hangs = any(worker.hangs for worker in world.alive())
    if not (spent or hangs or any(use.is_given_up for use in job.slots.values())):
        # With no usable host left the last holder of the state stays where it is.
        assert size == max(wanted, 1), f"{size} workers where {wanted} are wanted"


def check_schedule(seed: int, make_world: Callable[[int], SimulatedJob] = random_world) -> SimulatedJob:
    world = make_world(seed)
    try:
        world.run()
        check_at_rest(world)
        if world.end is None:
            world.finish_training()
            world.run()
        assert world.end or not world.job.generation, "the training is over and the job is not"
        if world.end is None:
            return world
        if world.job.is_released and world.end.exit_code != STOPPED_EXIT_CODE:
            assert (world.end.exit_code == 0) == (not world.invariants.failed_after_release) or world.job.losses_now()
    except AssertionError as error:
        recent = "\n".join(f"{at_s:10.4f} {happened}" for at_s, happened in world.history[-60:])
        raise AssertionError(f"seed {seed}: {error}\n{recent}\n{world.job}") from error
    return world


@cache
def check_kept_schedule(seed: int, make: Callable[[int], SimulatedJob] = random_world) -> SimulatedJob:
    """The same, once for the tests that play one schedule after the other and those that look at what they reach."""
    return check_schedule(seed, make)


@pytest.fixture(scope="module", autouse=True)
def forget_schedules() -> Iterator[None]:
    yield
    check_kept_schedule.cache_clear()


def check_schedules(first: int, make: Callable[[int], SimulatedJob] = random_world) -> None:
    for seed in range(first, first + BATCH):
        (check_kept_schedule if seed < KEPT else check_schedule)(seed, make)


@pytest.mark.parametrize("first", range(0, SCHEDULES, BATCH))
def test_every_random_schedule_keeps_the_rules_and_comes_to_a_good_end(first: int) -> None:
    check_schedules(first)


def test_holders_that_leave_stay_as_long_as_one_of_them_may_be_a_step_ahead() -> None:
    """A worker may leave in the generation after one that ended before any survivor had its state."""
    check_schedule(10524)


@pytest.mark.parametrize("first", range(0, HOSTS_SCHEDULES, BATCH))
def test_every_schedule_of_hosts_keeps_horovod_s_policies_and_comes_to_a_good_end(first: int) -> None:
    check_schedules(first, random_hosts_world)


@pytest.mark.parametrize("first", range(0, JOINING_SCHEDULES, BATCH))
def test_every_schedule_of_agents_that_join_and_are_cut_off_comes_to_a_good_end(first: int) -> None:
    check_schedules(first, random_joining_world)


def test_the_schedules_of_joining_agents_reach_the_cases_they_are_meant_for() -> None:
    worlds = [check_kept_schedule(seed, random_joining_world) for seed in range(400)]
    assert sum(world.end is not None and world.end.exit_code == 0 for world in worlds) > 60
    assert sum(world.job.run_id > 3 for world in worlds) > 5, "no job went on from its checkpoint"
    assert sum(world.invariants.waited_for_leases for world in worlds) > 5, "no generation had to wait for a lease"


@pytest.mark.parametrize("first", range(0, SPARES_SCHEDULES, BATCH))
def test_every_schedule_with_spares_keeps_the_rules_and_comes_to_a_good_end(first: int) -> None:
    check_schedules(first, random_spares_world)


def test_the_schedules_with_spares_reach_the_cases_they_are_meant_for() -> None:
    worlds = [check_kept_schedule(seed, random_spares_world) for seed in range(KEPT)]
    assert sum(world.spares_admitted for world in worlds) > 30
    assert sum(bool(world.job.missing_spares) for world in worlds) > 20
    rests = [use for world in worlds for use in world.job.slots.values() if use.failures >= 2]
    assert len(rests) > 10


def test_the_schedules_of_hosts_reach_the_cases_they_are_meant_for() -> None:
    worlds = [check_kept_schedule(seed, random_hosts_world) for seed in range(600)]
    ends = [world.end for world in worlds if world.end is not None]
    reasons = " ".join(end.reason for end in ends)
    assert sum(end.exit_code == 0 for end in ends) > 60
    for words in ("--reset-limit", "--elastic-timeout", "--start-timeout", "excluded after failures", "is lost"):
        assert words in reasons, words
    assert max(world.invariants.number for world in worlds) >= 8
    assert any(ban.is_over for world in worlds for ban in world.job.bans.values())


def test_the_schedules_reach_the_cases_they_are_meant_for() -> None:
    """A simulator that never gets anywhere would pass every test."""
    worlds = [check_kept_schedule(seed, random_world) for seed in range(300)]
    ends = [world.end for world in worlds if world.end is not None]
    reasons = " ".join(end.reason for end in ends)
    assert sum(end.exit_code == 0 for end in ends) > 60
    for words in (
        "raised the same",
        "state of the job is lost",
        "--elastic-timeout",
        "--start-timeout",
        "Ctrl-C",
        "last worker left",
        "--step-timeout",
        "elastic function",
        "restart budget",
    ):
        assert words in reasons, words
    assert max(world.invariants.number for world in worlds) >= 8


def random_large_world(seed: int) -> SimulatedJob:
    """Many hosts of eight workers, and bursts of faults, each of which may hit some of the workers or a whole host."""
    dice = random.Random(seed)
    habits = replace(random_habits(dice), is_elastic=True, hangs=0.0, crashes=0.0, gathers_s=0.01)
    config = JobConfig(LARGE_WORKERS, elastic_timeout_s=30.0, start_timeout_s=20.0, step_timeout_s=5.0)
    world = SimulatedJob(config, seed, habits)
    hosts = LARGE_WORKERS // 8
    for index in range(hosts):
        agent = "ab"[index] if index < 2 else f"host{index}"
        world.after(index / hosts, partial(world.connect, agent, 8))
    for _ in range(3):
        at_s = dice.uniform(1.0, 5.0)
        for _ in range(dice.choice([1, 3, 20])):
            world.after(at_s, lambda: hurt(world))
            at_s += 10 ** dice.uniform(-4, -0.5)
        world.after(at_s, partial(world.lose_agent, f"host{dice.randrange(2, hosts)}", dice.choice([None, 0.3])))
    return world


@pytest.mark.parametrize("seed", range(3))
def test_a_large_job_keeps_the_rules_and_comes_to_a_good_end(seed: int) -> None:
    check_schedule(seed, random_large_world)


def random_asked_world(seed: int) -> SimulatedJob:
    """People scale the job, drain hosts and want them back; workers die, and links between hosts break, meanwhile."""
    dice = random.Random(seed)
    num_proc = dice.randint(2, 4)
    config = JobConfig(num_proc, min_np=dice.randint(1, 2), max_np=6, restarts=3, elastic_timeout_s=30.0)
    world = SimulatedJob(config, seed, Habits(agrees=dice.random() < 0.7, gathers_s=dice.choice(GATHERS_S)))
    for agent in "abc":
        world.connect(agent, dice.randint(1, 3))

    def ask() -> None:
        kind, agent = dice.randrange(100), dice.choice("abc")
        if kind < 30:
            world.drain_host(agent)
        elif kind < 50:
            world.undrain_host(dice.choice(sorted(world.drained) or ["a"]))
        elif kind < 60:
            world.scale(dice.randint(1, 6))
        elif kind < 75:
            world.silence(*dice.sample("abc", 2), dice.uniform(0.1, 10.0))
        elif kind < 80:
            world.lose_agent(agent)
        elif world.alive():
            world.exit(dice.choice(world.alive()), -9)

    for _ in range(dice.randint(2, 8)):
        world.after(dice.uniform(0.5, 6.0), ask)
    return world


def test_what_people_ask_for_is_done_whatever_else_happens() -> None:
    worlds = [check_schedule(seed, random_asked_world) for seed in range(400)]
    logged = [event for world in worlds for event in world.logged]
    assert sum(isinstance(event, HostDrained) for event in logged) >= 100
    assert sum(isinstance(event, HostUndrained) for event in logged) >= 50
    assert sum(isinstance(event, LinksDistrusted) and event.is_proved for event in logged) >= 50


def random_stall(dice: random.Random, number: int) -> StepsStalled:
    names = [f"w{index}" for index in range(dice.randint(0, 5))]
    hung = tuple(name for name in names if dice.random() < 0.3)
    return StepsStalled(number, 5.0, number, hung, tuple(name for name in names if name not in hung))


def random_input(dice: random.Random, offering: float = 0.0) -> Input:
    """Any input at all, mostly nonsense. `offering`: how often hosts are offered."""
    worker, agent, number = f"w{dice.randrange(5)}", dice.choice("ab"), dice.randrange(6)
    said: list[WorkerMessage] = [
        Hello(worker, "", 1, 1, DataAddress("127.0.0.1", 1)),
        Elastic(),
        Ready(number),
        Synced(number),
        LinkBroken(number, f"w{dice.randrange(5)}", "send", ""),
        Probed(number, (), tuple(f"w{dice.randrange(5)}" for _ in range(dice.randrange(3)))),
        Failed("ValueError: x", ""),
        Finished(number),
        Leaving(),
    ]
    messages: list[AgentMessage] = [FromWorker(worker, dice.choice(said))] * 12
    messages += [
        WorkerExited(worker, dice.choice([0, 1, -9, -99])),
        WorkerDying(worker),
        SpawnFailed(worker, ""),
        Heartbeat(1),
        AgentLeaving("fuzz"),
    ]
    inputs: list[Input] = [AgentReported(agent, dice.choice(messages)) for _ in range(40)]
    inputs += [
        AgentConnected(agent, agent, dice.randint(0, 4)),
        Tick(),
        AskScale(number),
        AskDrain(agent),
        AskUndrain(agent),
        random_stall(dice, number),
    ]
    inputs += [HostsOffered(random_hosts(dice), dice.random() < 0.5)] if dice.random() < offering else []
    inputs += [AgentLost(agent, "fuzz"), StopRequested(dice.random() < 0.1, "Fuzz.")] if dice.random() < 0.1 else []
    return dice.choice(inputs)


def sensible_beginning(dice: random.Random) -> list[Input]:
    """Some words in the right order, so that nonsense hits every phase of a job."""
    hello = [Hello(f"w{index}", "", 1, 1, DataAddress("127.0.0.1", index + 1)) for index in range(5)]
    said: list[FromWorker] = [FromWorker(each.worker, each) for each in hello]
    for message in (Elastic(), Synced(1), Finished(1)):
        said += [FromWorker(each.worker, message) for each in hello]
    spoken = [AgentReported(agent, each) for each in said for agent in ("a", "b")]
    return [AgentConnected("b", "b", 2), *spoken[: dice.randrange(len(spoken) + 1)]]


@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_no_order_of_inputs_breaks_a_rule_or_raises(first: int) -> None:
    for seed in range(first, first + 250):
        dice = random.Random(seed)
        follows_hosts = seed % 2 == 1
        config = random_horovod_config(dice) if follows_hosts else random_config(dice)
        job, invariants, now_s = new_job(config, "fuzz"), MembershipInvariants(config), 0.0
        inputs = [
            AgentConnected("a", "a", 3),
            *sensible_beginning(dice),
            *(random_input(dice, 0.3 if follows_hosts else 0.0) for _ in range(150)),
        ]
        while inputs:
            together = 1 if seed % 4 < 2 else dice.choice([1, 1, 2, 5, 20])
            happened, inputs = inputs[:together], inputs[together:]
            now_s += dice.choice([0.0, 0.01, 1.0])
            job, actions = decide(job, happened, now_s)
            try:
                invariants.watch(happened, actions, now_s)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {error}") from error


def random_restarting_world(seed: int) -> SimulatedJob:
    """Scripts that mostly have no elastic function, and are restarted as a whole."""
    dice = random.Random(seed)
    config = JobConfig(
        num_proc=dice.randint(1, 4),
        restarts=dice.choice([0, 1, 3]),
        max_restarts=dice.choice([0, 1, 1, 2, 3]),
        start_timeout_s=20.0,
        elastic_timeout_s=10.0,
        takes_agents=dice.random() < 0.3,
    )
    if seed % 3 == 0:
        most = config.num_proc + dice.randint(0, 3)
        last_call_s = dice.choice([0.0, 0.5, 2.0])
        config = replace(config, takes_agents=True, fills_slots=True, max_np=most, last_call_s=last_call_s)
    habits = Habits(
        is_elastic=dice.random() < 0.2,
        calls_init=dice.random() < 0.6,
        crashes=dice.choice([0.0, 0.0, 0.1, 0.5]),
        repeats=dice.choice([0.0, 0.0, 0.05, 0.3]),
        gathers_s=dice.choice(GATHERS_S),
    )
    world = SimulatedJob(config, seed, habits)
    if dice.random() < 0.4:
        world.connect("a", (config.num_proc + 1) // 2)
        world.after(dice.uniform(0, 1), lambda: world.connect("b", config.num_proc))
    else:
        world.connect("a", config.num_proc + dice.randint(0, 1))

    if world.job.config.fills_slots:
        world.after(dice.uniform(0.0, 6.0), lambda: world.connect("c", dice.randint(1, 2)))

    def fail() -> None:
        kind, alive = dice.randrange(100), world.alive()
        if kind < 3:
            world.stop(now=dice.random() < 0.3)
        elif kind < 10:
            world.lose_agent(dice.choice("ab"), dice.choice([None, 0.3, 3.0]))
        elif kind < 13:
            world.drain_agent(dice.choice("ab"))
        elif kind < 16:
            world.scale(dice.randint(1, 4))
        elif alive and kind < 20:
            dice.choice(alive).leave()
        elif alive and kind < 25:
            dice.choice(alive).fail("ValueError: only here")
        elif alive:
            world.exit(dice.choice(alive), dice.choice([-9, -9, -11, 0, 1, 3, 7]))

    for _ in range(dice.randint(0, 6)):
        # In bursts: a second failure while the workers are being stopped is one of those that matter.
        at_s = dice.uniform(0.0, 8.0)
        for _ in range(dice.randint(1, 3)):
            world.after(at_s, fail)
            at_s += 10 ** dice.uniform(-4, 0.3)
    if dice.random() < 0.5:
        world.after(dice.uniform(1.0, 12.0), world.finish_training)
    return world


def check_restarting_schedule(seed: int) -> SimulatedJob:
    world = random_restarting_world(seed)
    try:
        world.run()
        assert world.end is not None or world.job.whole_restart is None, "a restart that never comes to its end"
        if world.end is None:
            world.finish_training()
            world.run()
        waits_for_ever = world.end is None and not world.job.workers
        assert not waits_for_ever, "neither workers nor an end"
        restarts, most = world.invariants.restarts_of_all, world.job.config.max_restarts
        assert world.job.attempt == world.invariants.attempt or world.end is not None
        assert restarts == world.job.failed_attempts
        assert restarts + world.invariants.restarts_for_slots - world.job.attempt in (0, 1)
        if world.end is not None:
            check_end_of_restarts(world, world.end.exit_code, world.end.reason, restarts, most)
    except AssertionError as error:
        recent = "\n".join(f"{at_s:10.4f} {happened}" for at_s, happened in world.history[-60:])
        raise AssertionError(f"seed {seed}: {error}\n{recent}\n{world.job}") from error
    return world


def check_end_of_restarts(world: SimulatedJob, code: int, reason: str, restarts: int, most: int | None) -> None:
    """All restarts are used before a failure ends the job, and its exit code is that of the last failure."""
    is_used_up = "(--max-restarts)" in reason or "--max-restarts 0" in reason
    assert not is_used_up or restarts == most, f"ended after {restarts} restarts of {most}"
    lost = [event for event in world.logged if isinstance(event, WorkerLost)]
    if is_used_up:
        words = lost[-1].how.split()
        exited = int(words[-1]) if words[:3] == ["exited", "with", "code"] else 1
        assert code == exited, f"exit code {code} after a worker {lost[-1].how}"
    if code == 0:
        assert world.job.whole_restart is None, "a success while all workers are being restarted"


@pytest.mark.parametrize("first", range(0, SCHEDULES, BATCH))
def test_every_schedule_of_whole_restarts_keeps_the_rules_and_comes_to_a_good_end(first: int) -> None:
    for seed in range(first, first + BATCH):
        check_restarting_schedule(seed)


def test_the_schedules_of_whole_restarts_reach_the_cases_they_are_meant_for() -> None:
    worlds = [check_restarting_schedule(seed) for seed in range(300)]
    ends = [world.end for world in worlds if world.end is not None]
    assert sum(end.exit_code == 0 and world.job.attempt > 0 for world in worlds if (end := world.end)) > 30
    assert sum("(--max-restarts)" in end.reason for end in ends) > 30
    assert sum(end.exit_code == 130 for end in ends) > 5
    assert sum(world.job.whole_restart is not None for world in worlds) > 2, "no end came in the middle of a restart"
    assert sum(world.job.is_elastic and world.job.attempt > 0 for world in worlds) > 2
    assert sum(world.invariants.restarts_for_slots for world in worlds) > 10, "no host came while others trained"
