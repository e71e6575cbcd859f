"""How tensors move in a world, decided from where its ranks are."""

from __future__ import annotations

import pytest

from farandole.collectives.transport_choice import Way, decide
from farandole.errors import ConfigError


@pytest.mark.parametrize(
    ("hosts", "choice", "way"),
    [
        ("a", "auto", Way.ALONE),
        ("a", "shm", Way.ALONE),
        ("aa", "auto", Way.SHARED_MEMORY),
        ("aa", "shm", Way.SHARED_MEMORY),
        ("aa", "hierarchical", Way.SHARED_MEMORY),
        ("aa", "tcp", Way.TCP),
        ("aa", "gloo", Way.GLOO),
        ("aab", "gloo", Way.GLOO),
        ("a", "gloo", Way.ALONE),
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
    with pytest.raises(ConfigError, match="these are on 2: use auto"):
        decide(hosts, "shm")


def test_an_unknown_word_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"one of auto, .*, got 'udp'"):
        decide("aa", "udp")
