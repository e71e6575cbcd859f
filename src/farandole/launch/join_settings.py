"""The command line options of a job for agents of other machines. Used by arguments.py."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

from farandole.errors import ConfigError
from farandole.launch.host_list import HostSlots


@dataclass(frozen=True)
class Joining:
    """The way in which agents of other machines join: with the token in this file."""

    token: bytes = field(repr=False)
    token_file: str


def joining(token_file: Path | None, discovery_script: str | None) -> Joining | None:
    """Return the settings for joining agents. Creates the file when it is missing. Raises ConfigError when that
    fails."""
    if token_file is None:
        return None
    if discovery_script is not None:
        raise ConfigError("--token-file and --host-discovery-script both say which hosts there are; give one of them")
    from farandole.launch.token_file import token_of_job

    return Joining(token_of_job(token_file), str(token_file))


def local_hosts(options: argparse.Namespace) -> tuple[HostSlots, ...]:
    """Return the hosts of --local-slots: this machine, or none."""
    if options.token_file is None:
        raise ConfigError("--local-slots needs --token-file: nobody else could join")
    for flag, value in (
        ("--hosts", options.hosts),
        ("--hostfile", options.hostfile),
        ("--host-discovery-script", options.host_discovery_script),
    ):
        if value is not None:
            raise ConfigError(f"--local-slots and {flag} both say where workers run; give one of them")
    if options.local_slots < 0:
        raise ConfigError(f"--local-slots must not be negative, got {options.local_slots}")
    return (HostSlots("localhost", options.local_slots),) if options.local_slots else ()


def check_address(host: str, port: int, takes_agents: bool) -> None:
    """Check the address on which the coordinator will listen. Raises ConfigError for an address that cannot be used, or
    was not clearly requested."""
    import ipaddress  # here, as below: `--help` answers at once

    try:
        address = None if host == "localhost" else ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(f"--host needs a numeric address of this machine, got {host}") from None
    if address is not None and address.is_unspecified:
        raise ConfigError(f"--host {host}: give the address by which the other machines reach this one")
    if address is not None and not address.is_loopback and not takes_agents:
        raise ConfigError(
            f"--host {host}: only a loopback address such as 127.0.0.1 is possible without --token-file FILE, "
            "which lets agents of other machines join"
        )
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port must be between 0 and 65535, got {port}")
