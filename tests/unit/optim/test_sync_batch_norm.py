"""SyncBatchNorm in a world of one, and its function against torch's. Over ranks: test_distributed_optimizer.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from farandole.base.membership import GenerationId, Placement
from farandole.integrations.horovod.named.engine import NAMED, NamedCollectives
from farandole.integrations.horovod.sync_batch_norm import SyncBatchNorm, _Normalize
from farandole.training.collectives import world
from farandole.training.collectives.alone import AloneTransport
from farandole.training.collectives.transport import Transport

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    placement = Placement(0, 1, 0, 1, 0, 1)

    def connect(ranks: tuple[int, ...], process_set: int) -> Transport:
        return AloneTransport(1)

    named = NamedCollectives(AloneTransport(1), placement=placement, connect=connect)
    world.enter(world.World(GenerationId(1, 1, 1, ""), placement, AloneTransport(1), {NAMED: named}))
    yield
    named.close()
    world.enter(None)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("tracks", [True, False])
def test_alone_it_is_torchs(affine: bool, momentum: float | None, tracks: bool) -> None:
    options: dict[str, Any] = {"momentum": momentum, "affine": affine, "track_running_stats": tracks}
    ours, theirs = SyncBatchNorm(3, **options), torch.nn.BatchNorm2d(3, **options)
    for _ in range(3):
        x = torch.randn(4, 3, 2, 2)
        assert torch.equal(ours(x), theirs(x))
    ours.eval()
    theirs.eval()
    assert torch.equal(ours(x), theirs(x))
    assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), theirs.buffers(), strict=True))


def test_the_gradients_are_those_of_torchs() -> None:
    x = torch.randn(5, 3, 4, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    inputs = (x, weight, bias)
    out, mean, variance, count = _Normalize.apply(*inputs, 1e-5)  # type: ignore[no-untyped-call]
    wanted = torch.nn.functional.batch_norm(x, None, None, weight, bias, training=True)
    assert torch.allclose(out, wanted)
    assert count == 20
    assert torch.allclose(mean, x.mean((0, 2)))
    assert torch.allclose(variance, x.var((0, 2), unbiased=False))
    direction = torch.randn_like(out)
    ours = torch.autograd.grad(out, inputs, direction)
    theirs = torch.autograd.grad(wanted, inputs, direction)
    assert all(torch.allclose(a, b) for a, b in zip(ours, theirs, strict=True))


def test_large_means_do_not_cancel() -> None:
    x = torch.randn(100, 2) + 10_000
    _, mean, variance, _ = _Normalize.apply(x, None, None, 1e-5)  # type: ignore[no-untyped-call]
    assert torch.allclose(mean, x.double().mean(0), rtol=1e-12)
    assert torch.allclose(variance, x.double().var(0, unbiased=False), rtol=1e-5)


@pytest.mark.parametrize("shape", [(3,), (2, 4)])
def test_inputs_without_its_channels_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"takes inputs of shape \(N, 3, \.\.\.\)"):
        SyncBatchNorm(3)(torch.zeros(shape))


def test_one_value_for_each_channel_is_refused() -> None:
    with pytest.raises(ValueError, match="got 1"):
        _Normalize.apply(torch.zeros(1, 3), None, None, 1e-5)  # type: ignore[no-untyped-call]
