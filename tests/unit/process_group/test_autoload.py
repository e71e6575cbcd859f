"""The watch for training alone, in the hooks of torch's optimizers."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.optim.optimizer import register_optimizer_step_post_hook

from farandole.base.membership import GenerationId, Placement
from farandole.integrations.torchrun.process_group import autoload
from farandole.integrations.torchrun.process_group.autoload import LoneTraining
from farandole.training.collectives import world
from farandole.training.collectives.alone import AloneTransport


def test_a_worker_that_has_met_the_others_unnoticed_is_left_in_peace_and_so_are_other_hooks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reports: list[bool] = []
    monkeypatch.setattr(autoload, "_report", lambda has_met: reports.append(has_met))
    lone, steps = LoneTraining(0, 2), list[object]()
    lone.watch()
    behind = register_optimizer_step_post_hook(lambda optimizer, *_: steps.append(optimizer))
    try:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        optimizer.step()
        assert reports == [False]
        world.enter(world.World(GenerationId(1, 1, 1, ""), Placement(0, 1, 0, 1, 0, 1), AloneTransport()))
        optimizer.step()
        optimizer.step()
        assert (reports, len(steps)) == ([False, True], 3)
        assert capsys.readouterr().err.count("meets the others now") == 1
    finally:
        world.enter(None)
        behind.remove()
        lone.end()
    optimizer.step()
    assert (reports, len(steps)) == ([False, True], 3)


def test_a_group_that_the_script_destroys_lives_until_it_destroys_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dist, distributed_c10d):  # replaced below
        monkeypatch.setattr(module, "destroy_process_group", dist.destroy_process_group)
    autoload._keep_groups()
    groups = []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        groups.append(weakref.ref(dist.group.WORLD))
        dist.destroy_process_group()
        assert not dist.is_initialized()
    assert groups[0]() is None
    assert groups[1]() is not None
