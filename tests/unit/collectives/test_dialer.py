"""Which addresses of a peer's machine are tried, and in which order."""

from __future__ import annotations

import pytest

from farandole.base.membership import DataAddress
from farandole.training.collectives.dialer import hosts_to_try

HERE = ("10.0.0.1", "172.17.0.1", "fd00::1")


@pytest.mark.parametrize(
    ("hosts", "own_hosts", "tried"),
    [
        (("10.0.0.2", "fd00::2"), HERE, ("10.0.0.2", "fd00::2")),
        (("172.17.0.1", "10.0.0.2"), HERE, ("10.0.0.2", "172.17.0.1")),  # the bridge of this machine's containers
        (("127.0.0.1", "10.0.0.2"), HERE, ("10.0.0.2", "127.0.0.1")),
        (HERE, HERE, HERE),  # the same machine
        (("127.0.0.1",), ("127.0.0.1",), ("127.0.0.1",)),
        (("127.0.0.1", "10.0.0.1"), ("127.0.0.1", "10.0.0.1"), ("127.0.0.1", "10.0.0.1")),
        (("127.0.0.1",), HERE, ("127.0.0.1",)),  # nothing else is known
        (("10.0.0.2",), (), ("10.0.0.2",)),
    ],
)
def test_addresses_that_may_lead_back_to_this_machine_come_last(
    hosts: tuple[str, ...], own_hosts: tuple[str, ...], tried: tuple[str, ...]
) -> None:
    assert hosts_to_try(address(hosts), address(own_hosts) if own_hosts else None) == tried


def test_addresses_that_lead_back_to_this_machine_are_left_out_where_the_peer_s_is_known_to_be_another_one() -> None:
    peer = address(("172.17.0.1", "127.0.0.1", "10.0.0.2"), "theirs")
    assert hosts_to_try(peer, address(HERE, "ours")) == ("10.0.0.2",)
    assert hosts_to_try(address(HERE, "theirs"), address(HERE, "ours")) == HERE, "nothing else is known"


def test_on_one_machine_the_addresses_that_both_know_come_first() -> None:
    """A network was added after one of them began to listen, or has gone since."""
    before, after = ("127.0.0.1", "10.0.0.1"), ("127.0.0.1", "172.18.0.1", "10.0.0.1")
    assert hosts_to_try(address(after, "ours"), address(before, "ours")) == ("127.0.0.1", "10.0.0.1", "172.18.0.1")
    assert hosts_to_try(address(before, "ours"), address(after, "ours")) == before


def address(hosts: tuple[str, ...], network: str = "") -> DataAddress:
    return DataAddress(hosts[0], 4242, hosts[1:], network)
