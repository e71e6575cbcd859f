"""Adasum against the paper's formula, and the same bits on all ranks."""

from __future__ import annotations

import pytest
import torch

from farandole.integrations.horovod.named import adasum
from farandole.training.collectives.alone import AloneTransport


class Gathered(AloneTransport):
    """A transport whose other ranks have said what they will say."""

    def __init__(self, rank: int, payloads: list[bytes]) -> None:
        super().__init__()
        self._rank, self._payloads = rank, payloads

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return len(self._payloads)

    def all_gather(self, payload: bytes) -> list[bytes]:
        assert payload == self._payloads[self._rank]
        return self._payloads


def vectors(count: int, length: int = 50) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(length, dtype=torch.float64, generator=generator) for _ in range(count)]


def formula(a: list[float], b: list[float]) -> list[float]:
    """Equation of the paper, in plain Python."""
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    square_a, square_b = sum(x * x for x in a), sum(x * x for x in b)
    keep_a, keep_b = 1 - dot / (2 * square_a), 1 - dot / (2 * square_b)
    return [keep_a * x + keep_b * y for x, y in zip(a, b, strict=True)]


def all_ranks(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """What each rank gets."""
    payloads = [part.view(torch.uint8).numpy().tobytes() for part in parts]
    results = [part.clone() for part in parts]
    for rank, tensor in enumerate(results):
        adasum.reduce(tensor, Gathered(rank, payloads))
    return results


def test_two_vectors_are_combined_by_the_papers_formula() -> None:
    a, b = vectors(2)
    wanted = torch.tensor(formula(a.tolist(), b.tolist()), dtype=torch.float64)
    assert torch.allclose(adasum.adasum(a, b), wanted, rtol=0, atol=1e-13)


def test_orthogonal_vectors_are_added_and_parallel_ones_averaged() -> None:
    x, y = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 3.0])
    assert torch.equal(adasum.adasum(x, y), x + y)
    assert torch.equal(adasum.adasum(x, x), x)
    assert torch.equal(adasum.adasum(x, 3 * x), (x + 3 * x) / 2)


def test_zeros_add_nothing() -> None:
    (a,) = vectors(1)
    assert torch.equal(adasum.adasum(a, torch.zeros_like(a)), a)
    assert torch.equal(adasum.adasum(torch.zeros_like(a), torch.zeros_like(a)), torch.zeros_like(a))


def test_four_and_eight_are_a_tree_of_neighbours() -> None:
    parts = vectors(8)
    pair = adasum.adasum
    four = pair(pair(parts[0], parts[1]), pair(parts[2], parts[3]))
    assert torch.equal(adasum.tree(parts[:4]), four)
    assert torch.equal(adasum.tree(parts), pair(four, pair(pair(parts[4], parts[5]), pair(parts[6], parts[7]))))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_all_ranks_get_the_same_bits(size: int, dtype: torch.dtype) -> None:
    parts = [part.to(dtype) for part in vectors(size)]
    results = all_ranks(parts)
    assert all(torch.equal(result, results[0]) for result in results)
    wanted = adasum.tree([part.double() for part in parts])
    assert torch.allclose(results[0].double(), wanted, rtol=4 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("size", [3, 5, 6, 7])
def test_other_numbers_of_ranks_are_refused(size: int) -> None:
    with pytest.raises(NotImplementedError, match=f"got {size}"):
        all_ranks(vectors(size))


def test_integers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.int64"):
        adasum.reduce(torch.ones(3, dtype=torch.int64), AloneTransport())


def test_a_matrix_keeps_its_shape_and_an_empty_tensor_is_left_alone() -> None:
    matrix = torch.ones(2, 3)
    adasum.reduce(matrix, AloneTransport())
    assert torch.equal(matrix, torch.ones(2, 3))
    adasum.reduce(torch.empty(0), AloneTransport())
