"""Agreeing on the state, in worlds of threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farandole.base.membership import Progress
from farandole.errors import FatalError, PeerLost
from farandole.integrations.horovod.torch_state import TorchState
from farandole.training.state import packing, sync
from farandole.training.state.state_digest import STRIKES, StateDigest
from farandole.training.state.sync import Divergence, Standing, choose_source, synchronize
from farandole.training.state.tensor_digest import digest_of
from tests.support.thread_world import ThreadTransport, ThreadWorld

pytestmark = pytest.mark.core


class Position:
    """A loader that only knows where it is."""

    def __init__(self) -> None:
        self.epoch = self.cursor = 0

    def commit(self, global_batch: Any) -> None:
        self.cursor = global_batch.stop

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "cursor": self.cursor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.cursor = state["epoch"], state["cursor"]

    def set_world(self, rank: int, size: int) -> None:
        pass

    def limit_local_batch(self, world: int) -> None:
        pass

    def warm_up(self) -> None:
        pass


def trained_state(seed: int, steps: int) -> TorchState:
    """A model with BatchNorm and Adam after some steps of its own."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state = TorchState(model=model, optimizer=optimizer, loader=Position(), scheduler=scheduler, best=float(seed))
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    state.step = steps
    state.loader.cursor = 8 * steps
    return state


def content(state: TorchState) -> Any:
    """Everything of a state, as comparable values."""
    tensors = state.live_tensors()
    return (
        state.progress,
        digest_of(list(tensors["parameters"]["model"].values())),
        {i: {k: torch.as_tensor(v).tolist() for k, v in e.items()} for i, e in tensors["optimizer"].items()},
        {name: buffer.tolist() for name, buffer in state.model.named_buffers()},
        [group["lr"] for group in state.optimizer.param_groups],
        state.scheduler.state_dict(),
        state.best,
    )


def sync_all(states: list[TorchState], world: ThreadWorld, bootstrap: bool, compares_all: bool = False) -> list[Any]:
    for state in states:
        state.capture()

    def call(transport: ThreadTransport) -> Any:
        return synchronize(states[transport.rank], transport, bootstrap, compares_all)

    return world.run(call)


def test_at_the_start_everybody_gets_the_state_of_rank_0() -> None:
    states = [trained_state(seed, 0) for seed in range(3)]
    wanted = content(states[0])
    reports = sync_all(states, ThreadWorld(3), bootstrap=True)
    assert [content(state) for state in states] == [wanted] * 3
    assert [report.source for report in reports] == [0, 0, 0]
    assert all(state.is_holder for state in states)


def test_the_highest_progress_wins_and_a_newcomer_is_never_the_source() -> None:
    newcomer, behind, ahead = trained_state(1, 0), trained_state(2, 3), trained_state(3, 4)
    behind.is_holder = ahead.is_holder = True
    wanted = content(ahead)
    reports = sync_all([newcomer, behind, ahead], ThreadWorld(3), bootstrap=False)
    assert [content(state) for state in (newcomer, behind, ahead)] == [wanted] * 3
    assert reports[0].source == 2
    assert reports[0].behind == (0, 1)


def test_equal_workers_copy_only_the_small_state() -> None:
    states = [trained_state(5, 2), trained_state(5, 2)]
    states[1].best = 99.0
    states[1].model[1].running_mean.fill_(7.0)
    for state in states:
        state.is_holder = True
    wanted = content(states[0])
    reports = sync_all(states, ThreadWorld(2), bootstrap=False)
    assert reports[0].behind == ()
    assert content(states[1]) == wanted


@pytest.mark.parametrize("is_equal", [True, False])
def test_survivors_whose_metadata_is_equal_send_nothing(is_equal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    states = [trained_state(5, 2), trained_state(5, 2)]
    states[1].best += not is_equal
    for state in states:
        state.is_holder = True
    sent, broadcast = [], ThreadTransport.broadcast

    def counted(transport: ThreadTransport, tensor: torch.Tensor, source: int) -> None:
        sent.append(tensor.numel())
        broadcast(transport, tensor, source)

    monkeypatch.setattr(ThreadTransport, "broadcast", counted)
    sync_all(states, ThreadWorld(2), bootstrap=False)
    assert bool(sent) is not is_equal
    assert content(states[0]) == content(states[1])
    assert all(state.is_holder for state in states)


def two_that_differ_in_one_weight() -> list[TorchState]:
    states = [trained_state(5, 2), trained_state(5, 2)]
    for state in states:
        state.is_holder = True
    with torch.no_grad():
        states[1].model[0].weight[0, 0] += 1e-3
    return states


def test_survivors_at_the_same_step_with_different_weights_are_noticed_named_and_made_the_same() -> None:
    states = two_that_differ_in_one_weight()
    wanted = content(states[0])
    reports = sync_all(states, ThreadWorld(2), bootstrap=False)
    assert reports[0].behind == (1,)
    assert reports[0].divergence == reports[1].divergence == Divergence(2, "model.0.weight", 1, (1,), 0, True)
    assert content(states[1]) == wanted


def test_the_majority_is_right_and_not_the_lowest_rank() -> None:
    states = [trained_state(5, 2) for _ in range(3)]
    for state in states:
        state.is_holder = True
    with torch.no_grad():
        states[0].optimizer.state[states[0].model[2].bias]["exp_avg"] += 1e-3
    wanted = content(states[1])
    reports = sync_all([*states, trained_state(6, 0)], ThreadWorld(4), bootstrap=False)
    assert reports[0].source == 1
    assert reports[0].behind == (0, 3)
    assert reports[0].divergence == Divergence(2, "optimizer.5.exp_avg", 1, (0,), 1, True)
    assert [content(state) for state in states] == [wanted] * 3


def test_a_difference_that_no_sample_shows_is_found_when_somebody_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newcomer has copied from a rank that turns out to be the only one that is wrong: it copies again."""
    monkeypatch.setattr(StateDigest, "of_sample", lambda *_, **__: 1)
    states = [trained_state(5, 2) for _ in range(3)]
    for state in states:
        state.is_holder = True
    with torch.no_grad():
        states[0].model[2].weight[0, 0] += 1e-3
    wanted = content(states[1])
    newcomer = trained_state(6, 0)
    reports = sync_all([*states, newcomer], ThreadWorld(4), bootstrap=False)
    assert reports[0].divergence == Divergence(2, "model.2.weight", 1, (0,), 1, True)
    assert [content(state) for state in (*states, newcomer)] == [wanted] * 4


def test_a_header_that_differed_has_the_next_sync_read_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateDigest, "of_sample", lambda *_, **__: 1)
    states = two_that_differ_in_one_weight()
    assert sync_all(states, ThreadWorld(2), bootstrap=False)[0].divergence is None
    states[1].digests.is_suspicious = True
    assert sync_all(states, ThreadWorld(2), bootstrap=False)[0].behind == (1,)
    assert not states[1].digests.is_suspicious


def test_buffers_and_tracked_tensors_are_compared_where_all_are_at_the_same_boundary() -> None:
    states = [trained_state(5, 2), trained_state(5, 2)]
    for state in states:
        state.is_holder = True
        state.model[0].register_buffer("queue", torch.zeros(4))
    states[1].model[0].queue[2] = 1.0
    reports = sync_all(states, ThreadWorld(2), bootstrap=False, compares_all=True)
    assert reports[0].divergence == Divergence(2, "model.0.queue", 1, (1,), 0, False)
    assert reports[0].behind == ()
    assert states[1].model[0].queue.tolist() == [0.0] * 4
    for _ in range(STRIKES):
        assert reports[0].local == ()
        states[0].model[0].queue[1] += 2.0  # computed from its own local batch, as it seems
        reports = sync_all(states, ThreadWorld(2), bootstrap=False, compares_all=True)
    assert (reports[0].divergence, reports[0].local) == (None, ("model.0.queue",))
    newcomer = trained_state(5, 0)
    newcomer.model[0].register_buffer("queue", torch.ones(4))
    sync_all([*states, newcomer], ThreadWorld(3), bootstrap=False)
    assert newcomer.digests.local == states[0].digests.local == {"model.0.queue"}


def test_different_weights_are_noticed_when_somebody_copies() -> None:
    states = [*two_that_differ_in_one_weight(), trained_state(6, 0)]
    wanted = content(states[0])
    reports = sync_all(states, ThreadWorld(3), bootstrap=False)
    assert [report.behind for report in reports] == [(1, 2)] * 3
    assert [content(state) for state in states] == [wanted] * 3


def test_a_loss_reads_a_sample_of_the_weights_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Survivors wait for the next step: reading gigabytes is not worth it, where hardly anything can change them."""
    states = [trained_state(5, 2), trained_state(5, 2)]
    for state in states:
        state.is_holder = True
    read = list[int]()
    monkeypatch.setattr(sync, "digest_of", lambda tensors: read.append(len(tensors)) or 1)
    reports = sync_all(states, ThreadWorld(2), bootstrap=False)
    assert (reports[0].behind, reports[0].divergence) == ((), None)
    assert not read


def test_a_copy_that_is_not_what_the_source_has_is_refused() -> None:
    """E.g. a thread of the script that changes a parameter of the source meanwhile."""
    source, newcomer = trained_state(1, 4), trained_state(2, 0)
    source.is_holder = True
    before = content(newcomer)
    move = packing.broadcast_all

    def and_change(transport: ThreadTransport, *args: Any) -> None:
        move(transport, *args)
        if transport.rank == 0:
            with torch.no_grad():
                source.model[0].weight[0, 0] += 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "broadcast_all", and_change)
        results = sync_all([source, newcomer], ThreadWorld(2), bootstrap=False)
    assert isinstance(results[1], FatalError)
    assert "another thread" in str(results[1])
    assert content(newcomer) == before
    assert not newcomer.is_holder


@pytest.mark.parametrize("collective", range(7))
def test_a_source_that_dies_in_the_middle_leaves_the_others_as_they_were(collective: int) -> None:
    """Collectives of a sync: standings, large skeleton, large data, digests, small skeleton, small data."""
    ahead, behind, newcomer = trained_state(1, 4), trained_state(2, 3), trained_state(3, 0)
    ahead.is_holder = behind.is_holder = True
    world = ThreadWorld(3)
    world.kill(rank=0, before=collective)
    before, target = content(behind), content(ahead)
    results = sync_all([ahead, behind, newcomer], world, bootstrap=False)
    if collective < 6:
        assert isinstance(results[1], PeerLost)
        assert content(behind) == before
        assert behind.is_holder
        assert not newcomer.is_holder
        again = sync_all([behind, newcomer], ThreadWorld(2), bootstrap=False)
        assert again[0].source == 0
        assert content(newcomer) == content(behind) == before
    else:  # a sync has no seventh collective: it was through
        assert content(behind) == content(newcomer) == target


def test_a_different_model_is_refused_by_name_and_nothing_changes() -> None:
    first, second = trained_state(1, 0), trained_state(2, 0)
    second.model = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1))
    results = sync_all([first, second], ThreadWorld(2), bootstrap=True)
    assert "model.0.weight" in str(results[1])


def standing(step: int, is_holder: bool = True, epoch: int = 0) -> Standing:
    return Standing(is_holder, Progress(step=step, epoch=epoch), (0, 0), (0, 0))


def test_the_source_is_the_lowest_rank_among_the_highest() -> None:
    assert choose_source([standing(3), standing(4), standing(4)], bootstrap=False) == 1
    assert choose_source([standing(4), standing(4, epoch=1)], bootstrap=False) == 1
    assert choose_source([standing(9, is_holder=False), standing(1)], bootstrap=False) == 1


def test_without_a_holder_nothing_starts_over_silently() -> None:
    with pytest.raises(FatalError, match="no worker holds the state"):
        choose_source([standing(0, is_holder=False)] * 2, bootstrap=False)


def test_many_tensors_of_odd_sizes_pass_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "PIECE_BYTES", 7)
    source = [torch.arange(5, dtype=torch.int16), torch.empty(0), torch.tensor(3.5), torch.randn(3, 3)]
    targets = [torch.zeros_like(tensor) for tensor in source]
    size = packing.total_bytes(source)

    def call(transport: ThreadTransport) -> None:
        mine = [source, targets, None][transport.rank]
        packing.broadcast_all(transport, mine, size, 0)

    assert ThreadWorld(3).run(call) == [None] * 3
    assert all(torch.equal(a, b) for a, b in zip(source, targets, strict=True))


def test_putting_back_undoes_what_an_aborted_pass_moved() -> None:
    state = trained_state(4, 2)
    state.capture()
    before = content(state)
    state.model.train()(torch.randn(8, 3))
    state.best = 5.0
    assert content(state) != before
    state.put_back()
    assert content(state) == before
