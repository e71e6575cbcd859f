"""Digests of tensors: equal for equal values, and others for every change that is likely."""

from __future__ import annotations

import pytest
import torch

from farandole.training.collectives.connection_pair import as_bytes
from farandole.training.state.tensor_digest import digest, digest_of

pytestmark = pytest.mark.core

SHORT, LONG = 1_000, 200_001  # elements; the long one is hashed by words, in several rows, with some left over


@pytest.mark.parametrize("elements", [SHORT, LONG])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_a_single_changed_element_changes_it(elements: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(elements, generator=generator).mul_(100).to(dtype)
    whole = digest_of([tensor])
    for place in [0, elements - 1, *torch.randint(elements, (30,), generator=generator).tolist()]:
        changed = tensor.clone()
        changed[place] += 1
        assert digest_of([changed]) != whole


@pytest.mark.parametrize("elements", [SHORT, LONG])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_swapped_values_and_changed_signs_change_it(elements: int, dtype: torch.dtype) -> None:
    """Signs are the highest bits of words: a sum of products of 64-bit words misses an even number of them."""
    tensor = torch.arange(1, elements + 1).to(dtype)
    swapped, two = tensor.clone(), tensor.clone()
    swapped[[3, elements - 4]] = tensor[[elements - 4, 3]]
    two[[5, elements - 6]] *= -1
    found = {digest_of([each]) for each in (tensor, -tensor, swapped, two, tensor.flip(0))}
    assert len(found) == 5


def test_it_follows_from_the_values_alone_and_not_from_where_they_are() -> None:
    room = torch.zeros(4 * LONG + 3, dtype=torch.uint8)
    tensor = torch.randn(LONG)
    for offset in (0, 1, 2, 3):
        room[offset : offset + 4 * LONG] = as_bytes(tensor)
        assert digest([room[offset : offset + 4 * LONG]]) == digest_of([tensor])
    image = torch.randn(4, 8, 16, 16)
    assert digest_of([image.to(memory_format=torch.channels_last)]) == digest_of([image])


def test_where_one_tensor_ends_and_the_next_one_begins_matters() -> None:
    tensor = torch.arange(10)
    assert digest_of([tensor[:4], tensor[4:]]) != digest_of([tensor[:5], tensor[5:]])
    assert digest_of([torch.empty(0), tensor]) != digest_of([tensor])
    assert digest_of([]) != 0


def test_it_is_the_same_in_every_process() -> None:
    """Also of other versions: workers of one job may start from different environments."""
    assert digest_of([torch.arange(200_000), torch.arange(5)]) == DIGEST


DIGEST = 6578990312462084959
