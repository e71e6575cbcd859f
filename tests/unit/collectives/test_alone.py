from __future__ import annotations

import pytest
import torch

from farandole.errors import GenerationEnded
from farandole.training.collectives.alone import AloneTransport

pytestmark = pytest.mark.core


def test_collectives_of_one_change_nothing() -> None:
    alone, tensor = AloneTransport(), torch.arange(5.0)
    assert (alone.rank, alone.size) == (0, 1)
    assert alone.all_reduce(tensor, b"trailer") == [b"trailer"]
    assert alone.all_gather(b"mine") == [b"mine"]
    alone.broadcast(tensor, 0)
    alone.barrier()
    assert torch.equal(tensor, torch.arange(5.0))


def test_what_a_ring_refuses_is_refused_alone_too() -> None:
    alone = AloneTransport()
    with pytest.raises(ValueError, match="contiguous"):
        alone.all_reduce(torch.zeros(3, 2).t())
    with pytest.raises(ValueError, match="float8_e5m2"):
        alone.all_reduce(torch.zeros(3, dtype=torch.float8_e5m2))
    with pytest.raises(ValueError, match="source"):
        alone.broadcast(torch.zeros(3), 1)


def test_an_abort_is_sticky() -> None:
    alone = AloneTransport(generation=3)
    alone.abort("worker w1 was lost")
    alone.abort("later news")
    for call in (alone.barrier, lambda: alone.all_gather(b""), lambda: alone.all_reduce(torch.zeros(1))):
        with pytest.raises(GenerationEnded, match="generation 3 has ended: worker w1 was lost"):
            call()
