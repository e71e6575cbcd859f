"""Hosts and their slots, as text and as ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import asdict

from farandole.job.coordinator.capacity import placements
from farandole.job.engines import host_list


@dataclass(frozen=True)
class HostInfo:
    """A host, and for how many workers it has capacity."""

    hostname: str
    slots: int

    @staticmethod
    def from_string(host_string: str) -> HostInfo:
        """Parse `name:slots`."""
        return parse_hosts(host_string)[0]


@dataclass
class SlotInfo:
    """The place of one worker."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    """Parse `a:2,b:2`. Raises ValueError for anything else."""
    return [HostInfo(host.name, host.slots) for host in host_list.parse_hosts(hosts_string)]


def parse_hosts_and_slots(hosts: str) -> tuple[list[str], dict[str, int]]:
    """Return the names, and the slots of each."""
    parsed = parse_hosts(hosts)
    return [host.hostname for host in parsed], {host.hostname: host.slots for host in parsed}


def parse_host_files(filename: str) -> str:
    """Return the lines `name slots=2` of a file as `name:2,...`."""
    from pathlib import Path

    return ",".join(f"{host.name}:{host.slots}" for host in host_list.parse_hostfile(Path(filename)))


def get_host_assignments(
    hosts: Sequence[HostInfo], min_num_proc: int, max_num_proc: int | None = None
) -> list[SlotInfo]:
    """Return the places of all workers, host by host, in order of rank; at most `max_num_proc`. Raises ValueError when
    the hosts have fewer slots than `min_num_proc`."""
    slots = [(host.hostname, local) for host in hosts for local in range(host.slots)][:max_num_proc]
    if len(slots) < min_num_proc:
        raise ValueError(f"{min_num_proc} workers were requested, but the hosts have only {len(slots)} slots")
    placed = zip(slots, placements(slots), strict=True)
    return [SlotInfo(hostname=name, **asdict(placement)) for (name, _), placement in placed]
