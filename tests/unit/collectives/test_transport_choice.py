"""How tensors move in a world, decided from where its ranks are."""

from __future__ import annotations

import pytest
import torch

from farandole.errors import ConfigError
from farandole.training.collectives.alone import AloneTransport
from farandole.training.collectives.device_transport import StagedTransport, shared_devices
from farandole.training.collectives.transport_choice import Devices, Way, decide, own_devices, staging_reason, uses_nccl

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("hosts", "choice", "way"),
    [
        ("a", "auto", Way.ALONE),
        ("a", "shm", Way.ALONE),
        ("aa", "auto", Way.SHARED_MEMORY),
        ("aa", "shm", Way.SHARED_MEMORY),
        ("aa", "hierarchical", Way.SHARED_MEMORY),
        ("aa", "tcp", Way.TCP),
        ("ab", "auto", Way.TCP),
        ("ab", "hierarchical", Way.TCP),
        ("aab", "auto", Way.HIERARCHICAL),
        ("aba", "auto", Way.HIERARCHICAL),
        ("abab", "hierarchical", Way.HIERARCHICAL),
        ("aab", "tcp", Way.TCP),
    ],
)
def test_the_way_follows_from_the_hosts(hosts: str, choice: str, way: Way) -> None:
    assert decide(hosts, choice) is way


@pytest.mark.parametrize("hosts", ["ab", "aab"])
def test_shared_memory_alone_cannot_join_hosts(hosts: str) -> None:
    with pytest.raises(ConfigError, match="they are on 2: use auto"):
        decide(hosts, "shm")


def test_an_unknown_word_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"one of auto, .*, got 'udp'"):
        decide("aa", "udp")


FINE, ONE, NONE = Devices(2, ""), Devices(1, ""), Devices(0, "torch finds no CUDA device")


@pytest.mark.parametrize(
    ("hosts", "devices", "is_used"),
    [
        ("aa", [FINE, FINE], True),
        ("ab", [FINE, Devices(1, "")], True),
        ("aaa", [FINE, FINE, FINE], False),  # three workers, two devices
        ("aab", [FINE, FINE, NONE], False),
        ("aaa", [ONE, ONE, ONE], True),  # of its own, or a shared one: the first tensors tell
        ("aab", [ONE, FINE, FINE], False),
        ("aa", [FINE, Devices(2, "", slot=2)], False),  # a spare has taken over; its device is missing
        ("aa", [Devices(), Devices()], False),
    ],
)
def test_nccl_is_for_worlds_with_a_device_for_each_worker(hosts: str, devices: list[Devices], is_used: bool) -> None:
    assert uses_nccl(hosts, devices, "auto") is is_used
    for choice in ("tcp", "shm", "hierarchical"):
        assert not uses_nccl(hosts, devices, choice)


def test_there_is_a_reason_where_nccl_is_not_used() -> None:
    assert staging_reason("aaa", [FINE, FINE, FINE]) == (
        "there are 3 workers on the host of rank 0, which sees 2 CUDA devices"
    )
    assert staging_reason("aa", [FINE, Devices(2, "", slot=2)]) == "rank 1 is in slot 2, and sees 2 CUDA devices"
    assert staging_reason("ab", [FINE, NONE]) == "rank 1 cannot use it: torch finds no CUDA device"
    assert staging_reason("aab", [ONE, FINE, FINE]) == "the workers of one host see different numbers of CUDA devices"


def test_the_first_tensor_on_a_device_that_is_copied_warns_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    for number in range(2):  # generations
        staged = StagedTransport(AloneTransport(), is_host=lambda tensor: tensor.dtype is torch.int8, reason="a test")
        staged.all_reduce(torch.zeros(2, dtype=torch.int8))
        assert len(caplog.records) == number
        staged.all_reduce(torch.zeros(2))
        staged.broadcast(torch.zeros(2), 0)
    (record,) = caplog.records
    assert record.getMessage() == (
        "tensors on devices are copied through the memory of the host; NCCL is not used: a test"
    )


def test_nccl_is_refused_where_a_rank_cannot_use_it() -> None:
    with pytest.raises(ConfigError, match="rank 1 cannot use it: torch finds no CUDA device; use auto"):
        uses_nccl("ab", [FINE, NONE], "nccl")
    assert uses_nccl("aaa", [FINE, FINE, FINE], "nccl")  # each may be shown another one; this is found out later


@pytest.mark.parametrize(("hosts", "way"), [("aa", Way.SHARED_MEMORY), ("aab", Way.HIERARCHICAL), ("ab", Way.TCP)])
def test_under_nccl_all_other_tensors_take_the_fastest_way(hosts: str, way: Way) -> None:
    assert decide(hosts, "nccl") is way


def test_only_who_may_use_nccl_looks_for_devices() -> None:
    assert own_devices("tcp") == Devices()
    assert own_devices("auto").problem != Devices().problem


def test_ranks_that_share_a_device_are_named() -> None:
    assert shared_devices([b"a", b"b"]) == ""
    assert shared_devices([b"a", b"b", b"a"]) == "ranks 0, 2 share a device"
    assert shared_devices([b"a", b"b", b"a", b"b"]) == "ranks 0, 2 and ranks 1, 3 share a device"
