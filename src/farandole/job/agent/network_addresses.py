"""The addresses of this machine at which agents and workers of other machines may reach it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence

import psutil

from farandole.errors import ConfigError

_DISCARD_PORT = 9  # nothing is sent
_MOST_DATA_HOSTS = 8  # each costs every worker some sockets


def addresses_for(hosts: Iterable[str], interfaces: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the numeric addresses at which these hosts may reach this machine: first those from which this machine
    reaches them, then all others that are no loopback addresses. May take seconds, for the name service.

    Args:
        hosts: Names or addresses of other machines.
        interfaces: Only addresses of these network interfaces; empty: of all.

    Raises:
        ConfigError: There is no such interface, or it has no address.
    """
    usable = own_addresses(interfaces)
    towards = [address for host in hosts if (address := address_towards(host)) is not None and address in usable]
    return tuple(dict.fromkeys([*towards, *usable]))


def data_hosts(first: str) -> tuple[str, ...]:
    """Return the numeric addresses at which the workers of this machine listen for their peers: this one and, unless it
    is a loopback address, those of `with_others`."""
    return (first,) if ipaddress.ip_address(first).is_loopback else with_others(first)


def with_others(first: str) -> tuple[str, ...]:
    """Return this numeric address, and the others of this machine that are no loopback addresses. Which of them another
    machine can reach is found out by trying (collectives/dialer.py)."""
    return tuple(dict.fromkeys([first, *own_addresses()]))[:_MOST_DATA_HOSTS]


def own_addresses(interfaces: Sequence[str] = ()) -> list[str]:
    """Return the numeric addresses of the network interfaces that are up, without loopback and link-local addresses,
    those of IPv4 first.

    Raises:
        ConfigError: One of the given interfaces does not exist, or none of them has an address.
    """
    by_name, states = psutil.net_if_addrs(), psutil.net_if_stats()
    if unknown := [name for name in interfaces if name not in by_name]:
        raise ConfigError(f"there is no network interface {', '.join(unknown)} here, only {', '.join(sorted(by_name))}")
    found = [
        address
        for name, entries in by_name.items()
        if (name in interfaces or not interfaces) and (name not in states or states[name].isup)
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
        if not (address := ipaddress.ip_address(entry.address.partition("%")[0])).is_link_local
        if interfaces or not address.is_loopback
    ]
    if interfaces and not found:
        raise ConfigError(f"the network interfaces {', '.join(interfaces)} have no address")
    return [str(address) for address in sorted(found, key=lambda address: address.version)]


def address_towards(host: str) -> str | None:
    """Return the numeric address from which this machine would reach the host; None when there is no route, or the name
    is unknown."""
    try:
        found = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # of a datagram socket: it looks for the route, and sends nothing
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None
