"""The journal of a coordinator: its newest state, from which another one continues when it has died.

Each state replaces the one before. It is written before any message of its decisions is sent; so whatever an agent has
seen is in the journal, and what is not in the journal has been seen by nobody.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from farandole.coordinator.job import Job
from farandole.membership import Address
from farandole.wire.message_log import MessageLog
from farandole.wire.messages import ToAgent

_HEADER = struct.Struct(">QQI")  # number of the state, length and CRC-32 of its bytes


@dataclass
class AgentSession:
    """The session with an agent, over one connection after the other.

    process    the agent's process, as in AgentHello
    is_apart   as in AgentHello
    journaled  the number of its messages whose consequences are in the journal
    confirmed  the number of those that it knows to be so
    """

    process: str
    is_apart: bool
    log: MessageLog[ToAgent]
    journaled: int = 0
    confirmed: int = 0


@dataclass(frozen=True)
class CoordinatorState:
    """The state of a coordinator between two decisions.

    now_s             the time by its clock
    attempt           the newest one for which the store was emptied
    offered, joined   slots by host, as in HostsOffered; of the agents that have joined beside those
    agent_hosts       addresses from which agents have connected
    addresses         at which it listens
    """

    job: Job
    now_s: float
    attempt: int
    sessions: Mapping[str, AgentSession]
    offered: Mapping[str, int]
    joined: Mapping[str, int]
    agent_hosts: frozenset[str]
    addresses: tuple[Address, ...]


class Journal:
    """Two files, of which the older one is replaced by each state: one of them is complete at any time.

    The files are held open by the launcher, too, and may have no name: a state outlives the process that has written
    it.
    """

    def __init__(self, descriptors: tuple[int, int]) -> None:
        self.descriptors = descriptors
        self._number = max((number for number, _ in self._states()), default=0)

    @classmethod
    def in_memory(cls) -> Journal:
        """Return a journal of files that exist as long as a process has them open."""
        return cls((os.memfd_create("farandole-journal-0"), os.memfd_create("farandole-journal-1")))

    def write(self, data: bytes) -> None:
        """Replace the older state. Raises OSError when the memory, or the disk, is full."""
        self._number += 1
        descriptor = self.descriptors[self._number % 2]
        os.ftruncate(descriptor, 0)
        header = _HEADER.pack(self._number, len(data), zlib.crc32(data))
        written = os.pwritev(descriptor, [header, data], 0)
        if written < len(header) + len(data):
            raise OSError(f"{written} of {len(header) + len(data)} bytes of the coordinator's journal were written")

    def read(self) -> bytes | None:
        """Return the newest complete state; None: there is none."""
        return max(self._states(), default=(0, None))[1]

    def close(self) -> None:
        """Close the files."""
        for descriptor in self.descriptors:
            os.close(descriptor)

    def _states(self) -> list[tuple[int, bytes]]:
        found = []
        for descriptor in self.descriptors:
            data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            if len(data) >= _HEADER.size:
                number, length, checksum = _HEADER.unpack_from(data)
                state = data[_HEADER.size :]
                if len(state) == length and zlib.crc32(state) == checksum:
                    found.append((number, state))
        return found
