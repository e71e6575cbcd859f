"""Averages by the transports that know them: the bits of the sum, divided."""

from __future__ import annotations

import pytest
import torch

from farandole.training.collectives.shared_memory_tensors import shareable_zeros
from farandole.training.collectives.transport import Reduction
from tests.support.rings import ring


def filled(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Every other rank's tensor can be read by the others in place."""
    values = torch.randn(numel, dtype=dtype, generator=torch.Generator().manual_seed(rank))
    return shareable_zeros(numel, dtype).copy_(values) if rank % 2 else values


@pytest.mark.parametrize("choice", ["tcp", "shm"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_an_average_has_the_bits_of_the_divided_sum(size: int, choice: str) -> None:
    with ring(size, choice=choice) as world:
        for dtype in (torch.float32, torch.float64):
            for numel in (0, 1, size - 1, 1000, 700_001):
                sums, averages = ([filled(rank, numel, dtype) for rank in range(size)] for _ in range(2))
                world.run(lambda transport, sums=sums: transport.all_reduce(sums[transport.rank]))
                trailers = world.run(
                    lambda transport, averages=averages: transport.all_reduce(
                        averages[transport.rank], bytes([transport.rank]), Reduction.AVERAGE
                    )
                )
                assert trailers == [[bytes([rank]) for rank in range(size)]] * size
                for total, average in zip(sums, averages, strict=True):
                    assert torch.equal(average, total.div_(size)), (dtype, numel)
