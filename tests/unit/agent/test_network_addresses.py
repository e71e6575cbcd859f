"""The addresses at which other machines may reach this one."""

from __future__ import annotations

import ipaddress

import psutil
import pytest

from farandole.errors import ConfigError
from farandole.job.agent.network_addresses import address_towards, addresses_for, own_addresses


def loopback_interface() -> str:
    return next(
        name
        for name, entries in psutil.net_if_addrs().items()
        if any(entry.address == "127.0.0.1" for entry in entries)
    )


def test_own_addresses_are_numeric_and_no_loopback() -> None:
    addresses = [ipaddress.ip_address(each) for each in own_addresses()]
    assert not any(each.is_loopback or each.is_link_local for each in addresses)
    assert addresses == sorted(addresses, key=lambda each: each.version)


def test_a_loopback_interface_is_used_when_it_is_named() -> None:
    assert "127.0.0.1" in own_addresses([loopback_interface()])


def test_an_unknown_interface_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=f"no network interface ib7 here, only .*{loopback_interface()}"):
        own_addresses(["ib7"])


def test_the_way_to_a_host_comes_first_and_each_address_once() -> None:
    usable = own_addresses()
    if usable:
        assert addresses_for([usable[-1], "a name that nobody has"])[0] == usable[-1]
        assert sorted(addresses_for([usable[-1]])) == sorted(usable)


def test_the_way_to_loopback_is_loopback_and_an_unknown_name_has_none() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("a name that nobody has") is None
