"""Agreeing on the state under the commit rule, in worlds of threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farandole.errors import PeerLost
from farandole.integrations.horovod.committed_state import CommittedState, can_be_staged, synchronize_commits
from farandole.integrations.horovod.torch_state import TorchState
from tests.support.thread_world import ThreadTransport, ThreadWorld
from tests.unit.state.test_torch_state import Sampler, content, train

pytestmark = pytest.mark.core


def trained(seed: int, commits: int) -> CommittedState:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * seed)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state = TorchState(model, optimizer, batch=0, trail=[[]], scheduler=scheduler, sampler=Sampler())
    for _ in range(commits):
        train(state)
        state.sampler.record_batch(0, 2)
        scheduler.step()
        state.save()
    shared = CommittedState(state)
    shared.is_holder = commits > 0
    return shared


def sync_all(states: list[CommittedState], world: ThreadWorld, bootstrap: bool = False) -> list[Any]:
    def call(transport: ThreadTransport) -> Any:
        return synchronize_commits(states[transport.rank], transport, bootstrap)

    return world.run(call)


def everything(shared: CommittedState) -> Any:
    state = shared.state
    return content(state), state.scheduler.state_dict(), state.sampler.state_dict(), state._commits


def test_at_the_start_everybody_gets_the_state_of_rank_0() -> None:
    states = [trained(seed, 0) for seed in (1, 2, 3)]
    wanted = everything(states[0])
    sync_all(states, ThreadWorld(3), bootstrap=True)
    assert [everything(state) for state in states] == [wanted] * 3


def test_the_newest_commit_wins_and_a_newcomer_is_never_the_source() -> None:
    states = [trained(1, 3), trained(2, 4), trained(3, 0)]
    states[2].state._commits = 9
    wanted = everything(states[1])
    reports = sync_all(states, ThreadWorld(3))
    assert [everything(state) for state in states] == [wanted] * 3
    assert reports[0].source == 1


def test_what_was_synchronized_is_the_commit_from_then_on() -> None:
    states = [trained(1, 2), trained(2, 0)]
    wanted = everything(states[0])
    sync_all(states, ThreadWorld(2))
    for shared in states:
        train(shared.state)
        shared.state.restore()
    assert [everything(state) for state in states] == [wanted] * 2


def test_every_rank_divides_its_sampler_anew_also_the_source() -> None:
    states = [trained(1, 2), trained(1, 2)]
    before = [shared.state.sampler.loads for shared in states]
    sync_all(states, ThreadWorld(2))
    assert all(shared.state.sampler.loads > loads for shared, loads in zip(states, before, strict=True))


def test_live_values_that_were_not_committed_are_the_sources() -> None:
    """After HostsUpdatedInterrupt from check_host_updates() alone."""
    states = [trained(1, 2), trained(1, 2)]
    for shared in states:
        train(shared.state)
    states[1].state.batch = 99
    wanted = everything(states[0])
    sync_all(states, ThreadWorld(2))
    assert [everything(state) for state in states] == [wanted] * 2


def test_equal_workers_copy_no_parameters() -> None:
    torch.manual_seed(0)
    states = [trained(5, 2), trained(5, 2)]
    for shared in states[1:]:
        shared.state.model.load_state_dict(states[0].state.model.state_dict())
        shared.state.optimizer.load_state_dict(states[0].state.optimizer.state_dict())
    assert sync_all(states, ThreadWorld(2))[0].behind == ()


@pytest.mark.parametrize("collective", range(6))  # the samplers', and five of the sync
def test_a_source_that_dies_in_the_middle_leaves_the_others_at_their_commit(collective: int) -> None:
    states = [trained(1, 4), trained(2, 3), trained(3, 0)]
    world = ThreadWorld(3)
    world.kill(rank=0, before=collective)
    before = everything(states[1])
    results = sync_all(states, world)
    assert isinstance(results[1], PeerLost)
    assert everything(states[1]) == before
    sync_all(states[1:], ThreadWorld(2))
    assert everything(states[1])[0] == everything(states[2])[0] == before[0]


class IndexSampler(Sampler):
    """Each rank records the samples of its own."""

    def __init__(self, indices: set[int]) -> None:
        super().__init__()
        self.indices = indices

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_indices": self.indices}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.indices = state_dict["processed_indices"]
        self.loads += 1


def test_samples_that_each_rank_recorded_for_itself_are_united_but_not_a_newcomers() -> None:
    states = [CommittedState(TorchState(sampler=IndexSampler(indices))) for indices in ({1, 2}, {3}, {9})]
    for shared in states[:2]:
        shared.is_holder = True
    sync_all(states, ThreadWorld(3))
    assert [shared.state.sampler.indices for shared in states] == [{1, 2, 3}] * 3


def test_a_state_with_a_sync_of_its_own_is_not_taken_apart() -> None:
    class Mine(TorchState):
        def sync(self) -> None:
            super().sync()

    assert can_be_staged(TorchState(torch.nn.Linear(1, 1), batch=0, sampler=Sampler()))
    assert not can_be_staged(Mine(batch=0))
