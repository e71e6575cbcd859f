"""Hosts and their slots, or pods, as written by users, and how ssh reaches hosts. It loads no asyncio, for a quick
`--help`."""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from farandole.base.config import LONGEST_NAME, MOST_AGENTS, MOST_SLOTS, MOST_WORKERS
from farandole.errors import ConfigError

_HOST_LINE = re.compile(r"(?P<name>\S+)(?:\s+slots\s*=\s*(?P<slots>\S+))?")


@dataclass(frozen=True)
class HostSlots:
    """A host, under its given name, and for how many workers it has capacity. Raises ConfigError for an invalid name,
    fewer than one slot or more than MOST_SLOTS."""

    name: str
    slots: int

    def __post_init__(self) -> None:
        if len(self.name) > LONGEST_NAME:
            raise ConfigError(f"a host name may have at most {LONGEST_NAME} characters, got {len(self.name)}")
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.:%-]*", self.name):
            raise ConfigError(f"{self.name!r} is not a valid host name")
        if self.slots < 1:
            raise ConfigError(f"host {self.name} needs at least 1 slot, got {self.slots}")
        if self.slots > MOST_SLOTS:
            raise ConfigError(f"host {self.name} may have at most {MOST_SLOTS} slots, got {self.slots}")

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


@dataclass(frozen=True)
class HostScript:
    """A command that prints the hosts of a job, again and again: `host` or `host:slots` in each line.

    slots     of hosts without a number
    period_s  seconds between an answer and the next run; None: as DISCOVERY_PERIOD_S in discovery.py

    Raises ConfigError for fewer than one slot.
    """

    command: str
    slots: int = 1
    period_s: float | None = None

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ConfigError(f"--slots-per-host must be at least 1, got {self.slots}")


Hosts: TypeAlias = tuple[HostSlots, ...] | HostScript | None


@dataclass(frozen=True)
class SshSettings:
    """How ssh reaches the hosts. The user's ssh_config applies, too.

    port           None: that of ssh_config
    identity_file  of the private key; empty: those of ssh_config
    python         the interpreter on the hosts; empty: the path of this one
    program        the client
    """

    port: int | None = None
    identity_file: str = ""
    python: str = ""
    program: str = "ssh"


@dataclass(frozen=True)
class PodSelection:
    """The pods from which agents join.

    labels     a label selector, such as "app=train,role=worker"
    namespace  empty: that of this pod, or of the current context of the kubeconfig
    """

    labels: str
    namespace: str = ""


def check_total(hosts: Collection[HostSlots]) -> None:
    """Raise ConfigError for more hosts, or slots of all hosts together, than a job may have."""
    slots = sum(each.slots for each in hosts)
    if len(hosts) > MOST_AGENTS or slots > MOST_WORKERS:
        raise ConfigError(
            f"{len(hosts)} hosts with {slots} slots: a job may have {MOST_AGENTS} hosts and {MOST_WORKERS} slots"
        )


def chosen_hosts(
    hosts: str | None, hostfile: str | None, script: str | None, slots: int | None, period_s: float | None = None
) -> Hosts:
    """Return the hosts of the workers; the script is run again `period_s` seconds after each answer. Raises ConfigError
    when more than one source is named, or the one cannot be read."""
    named = {"hosts": hosts, "hostfile": hostfile, "host_discovery_script": script}
    given = [name for name, value in named.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"only one of {' and '.join(given)} can determine where the workers run")
    if hosts is not None:
        return parse_hosts(hosts, slots or 1)
    if hostfile is not None:
        return parse_hostfile(hostfile)
    return None if script is None else HostScript(script, slots or 1, period_s)


def parse_hosts(text: str, default_slots: int = 1) -> tuple[HostSlots, ...]:
    """Return the hosts in the order in which they are written: "a:2,b:2"; without a number, `default_slots`. Raises
    ConfigError for anything else, and for a host that is named twice."""
    entries = [entry.strip() for entry in text.split(",")]
    try:
        return _each_once(parse_host(entry, default_slots) for entry in entries)
    except ConfigError as error:
        raise ConfigError(f"the hosts {text!r} cannot be read: {error}; write them as host1:2,host2:4") from None


def parse_host(text: str, default_slots: int = 1) -> HostSlots:
    """Return one host: "a:2", or "a" with `default_slots`. Raises ConfigError for anything else."""
    name, colon, slots = text.rpartition(":")
    return HostSlots(name, _count(slots)) if colon else HostSlots(text, default_slots)


def parse_hostfile(path: str | Path) -> tuple[HostSlots, ...]:
    """Return the hosts of a file with a line "host slots=N" for each; "host" alone has one slot. Empty lines and text
    after a # are ignored. Raises ConfigError that names the line, also when there is no host in it."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the hostfile {path} cannot be read: {error}") from None
    hosts: list[HostSlots] = []
    for number, line in enumerate(lines, start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        try:
            match = _HOST_LINE.fullmatch(content)
            if match is None:
                raise ConfigError("a line must look like 'host slots=2'")
            slots = 1 if match["slots"] is None else _count(match["slots"])
            hosts = [*_each_once([*hosts, HostSlots(match["name"], slots)])]
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}, {line!r}: {error}") from None
    if not hosts:
        raise ConfigError(f"the hostfile {path} contains no host; it needs lines such as 'host slots=2'")
    return tuple(hosts)


@lru_cache(maxsize=1024)
def is_this_machine(name: str) -> bool:
    """Return whether the name, or numeric address, belongs to this machine. May query the name service, which can take
    seconds; the answer is cached."""
    if name in ("localhost", socket.gethostname()):
        return True
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: tuple[object, ...]) -> bool:
    """Return whether a socket can be bound to the address: only an address of this machine allows it."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0, *address[2:]))
    except OSError:
        return False
    return True


def _count(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"the number of slots must be a whole number, got {text!r}") from None


def _each_once(hosts: Iterable[HostSlots]) -> tuple[HostSlots, ...]:
    seen: dict[str, HostSlots] = {}
    for host in hosts:
        if host.name in seen:
            raise ConfigError(f"host {host.name} is listed twice")
        seen[host.name] = host
    return tuple(seen.values())
