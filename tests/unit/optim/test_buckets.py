"""Memory of buckets that is there before it is needed."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch

from farandole.training.collectives.shared_memory_tensors import can_share_memory
from farandole.training.optim.buckets import Buckets, reserve

pytestmark = [pytest.mark.core, pytest.mark.skipif(not can_share_memory(), reason="no shared memory on this platform")]


def segments() -> int:
    """How many this process has; each has more than one descriptor."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them
            if "memfd:farandole" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(os.stat(f"/proc/self/fd/{name}").st_ino)
    return len(found)


def test_buckets_take_what_was_reserved_for_them_and_the_next_ones_make_their_own() -> None:
    trained = [torch.nn.Parameter(torch.ones(300, 300)), torch.nn.Parameter(torch.ones(17))]
    frozen = torch.nn.Parameter(torch.ones(999, 999), requires_grad=False)
    before = segments()
    reserve([trained[0], frozen, trained[1]])
    assert segments() == before + 1
    first = Buckets(trained)
    assert segments() == before + 1
    assert not first.flats[0].any()
    second = Buckets(trained)
    assert segments() == before + 2
    first.flats[0].fill_(1)
    assert not second.flats[0].any()


def test_what_has_another_size_is_not_taken() -> None:
    reserve([torch.nn.Parameter(torch.ones(400, 400))])
    before = segments()
    Buckets([torch.nn.Parameter(torch.ones(401, 400))])
    assert segments() == before  # made, and gone with the buckets
    kept = Buckets([torch.nn.Parameter(torch.ones(400, 400))])
    assert segments() == before
    assert kept.flats[0].numel() == 400 * 400
