"""Random schedules in which the coordinator loses its journal: the job goes on, and no rule is broken."""

from __future__ import annotations

import os
import random
from functools import partial

import pytest

from farandole.base.config import JobConfig
from farandole.base.wire.link_messages import LinkBroken
from tests.property.test_membership_schedules import check_at_rest
from tests.support.forgetful_job import ForgetfulJob
from tests.support.simulated_job import Habits

SCHEDULES = int(os.environ.get("MEMBERSHIP_SCHEDULES", "800"))
BATCH = 200


def random_world(seed: int) -> ForgetfulJob:
    """Workers and agents are lost around the time at which the journal is lost, and while agents tell."""
    dice = random.Random(seed)
    size = dice.randint(1, 5)
    config = JobConfig(
        size,
        min_np=dice.randint(1, size),
        restarts=1000,
        elastic_timeout_s=200.0,
        start_timeout_s=200.0,
        deferred_restart_s=dice.choice([0.0, 0.05, 1.0]),
        takes_agents=True,
    )
    habits = Habits(agrees=dice.random() < 0.7, gathers_s=dice.choice((0.0, 0.001, 0.02, 0.3)))
    world = ForgetfulJob(config, seed, habits)
    for agent in ("a", "b", "c"):
        world.after(dice.uniform(0.0, 1.0), partial(world.connect, agent, dice.randint(1, 3)))
    for _ in range(dice.randint(1, 2)):
        lost_s = dice.uniform(0.0, 2.0) if dice.random() < 0.2 else dice.uniform(2.0, 8.0)
        world.after(lost_s, world.lose_journal)
        for _ in range(dice.choice([0, 0, 1, 2, 4])):
            at_s = lost_s + dice.choice([-1, 1, 1]) * 10 ** dice.uniform(-4, 1)
            world.after(max(at_s, 0.1), partial(hurt, world))
    if dice.random() < 0.3:
        world.after(dice.uniform(0.5, 8.0), world.finish_training)
    return world


def hurt(world: ForgetfulJob) -> None:
    dice, alive = world.random, world.alive()
    if not alive:
        return
    victim, kind = dice.choice(alive), dice.random()
    if kind < 0.15:
        world.lose_agent(dice.choice(["a", "b", "c"]))
    elif kind < 0.5:
        world.exit(victim, -9)
    elif kind < 0.85:
        for peer in world.peers_of(victim)[:1]:
            world.say(victim, LinkBroken(victim.current, peer.name, "send", "reset"))
    else:
        victim.fail("ValueError: only here")


def check_schedule(seed: int) -> ForgetfulJob:
    world = random_world(seed)
    try:
        world.run()
        check_at_rest(world)
        if world.end is None:
            world.finish_training()
            world.run()
        assert world.end or not world.job.generation, "the training is over and the job is not"
    except AssertionError as error:
        recent = "\n".join(f"{at_s:10.4f} {happened}" for at_s, happened in world.history[-40:])
        raise AssertionError(f"seed {seed}: {error}\n{recent}\n{world.job}") from error
    return world


@pytest.mark.parametrize("first", range(0, SCHEDULES, BATCH))
def test_a_job_whose_journal_is_lost_keeps_the_rules_and_comes_to_a_good_end(first: int) -> None:
    worlds = [check_schedule(seed) for seed in range(first, first + BATCH)]
    assert sum(world.rebuilds for world in worlds) > BATCH / 2
    ended = [world.end for world in worlds if world.end is not None]
    assert sum(end.exit_code == 0 for end in ended) > BATCH / 4
    assert sum(world.regroups for world in worlds) > BATCH / 20
