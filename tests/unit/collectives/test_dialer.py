"""Which addresses of a peer's machine are tried, and in which order."""

from __future__ import annotations

import pytest

from farandole.collectives.dialer import hosts_to_try

HERE = ("10.0.0.1", "172.17.0.1", "fd00::1")


@pytest.mark.parametrize(
    ("hosts", "own_hosts", "tried"),
    [
        (("10.0.0.2", "fd00::2"), HERE, ("10.0.0.2", "fd00::2")),
        (("10.0.0.2", "172.17.0.1"), HERE, ("10.0.0.2",)),  # the bridge of this machine's containers
        (("127.0.0.1", "10.0.0.2"), HERE, ("10.0.0.2",)),
        (HERE, HERE, HERE),  # the same machine
        (("127.0.0.1",), ("127.0.0.1",), ("127.0.0.1",)),
        (("127.0.0.1", "10.0.0.1"), ("127.0.0.1", "10.0.0.1"), ("127.0.0.1", "10.0.0.1")),
        (("127.0.0.1",), HERE, ("127.0.0.1",)),  # nothing else is known
        (("10.0.0.2",), (), ("10.0.0.2",)),
    ],
)
def test_addresses_that_lead_back_to_this_machine_are_left_out(
    hosts: tuple[str, ...], own_hosts: tuple[str, ...], tried: tuple[str, ...]
) -> None:
    assert hosts_to_try(hosts, own_hosts) == tried
