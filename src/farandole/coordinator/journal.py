"""The journal of a coordinator: its newest state, from which another one continues when it has died.

Each state replaces the one before. It is written before any message of its decisions is sent; so whatever an agent has
seen is in the journal, and what is not in the journal has been seen by nobody.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import farandole
from farandole.coordinator.job import Job
from farandole.errors import FarandoleError
from farandole.membership import Address
from farandole.wire.message_log import MessageLog
from farandole.wire.messages import PROTOCOL_VERSION, ToAgent

_MAGIC = b"farandl1"
_HEADER = struct.Struct(">8sQIQ")  # magic, number of the state, lengths of the identity and the state
_CHECKSUM = struct.Struct(">I")  # CRC-32 of all the rest


class JournalError(FarandoleError):
    """The journal cannot be used: it is damaged, or of another job or version."""


@dataclass(frozen=True)
class JournalIdentity:
    """What a journal belongs to. `version` is that of the software that has written it."""

    job_id: str
    version: str = f"{farandole.__version__} (protocol {PROTOCOL_VERSION})"


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


_BY_PART = ("workers", "slots", "agents")  # the mappings of a job that grow with it


class StateEncoder:
    """Encodes one state after the other, each with something `beside` it.

    Values of a job are never changed in place. So of a large job only the workers, slots and agents are encoded again
    that have changed since the state before: of 4,096 workers one decision changes a few.
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[Any, tuple[object, bytes]]] = {name: {} for name in _BY_PART}

    def encode(self, state: CoordinatorState, beside: object) -> bytes:
        """Return the bytes for `decoded`."""
        parts = {name: self._encode_parts(name, getattr(state.job, name)) for name in _BY_PART}
        rest = replace(state, job=replace(state.job, workers={}, slots={}, agents={}))
        return pickle.dumps((rest, parts, beside))

    def _encode_parts(self, name: str, parts: Mapping[Any, object]) -> list[bytes]:
        known = self._known[name]
        encoded = self._known[name] = {}
        for key, part in parts.items():
            former = known.get(key)
            encoded[key] = former if former is not None and former[0] is part else (part, pickle.dumps((key, part)))
        return [data for _, data in encoded.values()]


def decoded(data: bytes) -> tuple[CoordinatorState, Any]:
    """Return the state, and what is beside it.

    Raises:
        JournalError: It cannot be decoded.
    """
    try:
        rest, encoded, beside = pickle.loads(data)
        parts = {name: dict(map(pickle.loads, encoded[name])) for name in _BY_PART}
        return replace(rest, job=replace(rest.job, **parts)), beside
    except Exception as error:  # noqa: BLE001 - as many as there are ways to differ
        raise JournalError(
            f"the coordinator's journal cannot be read ({error!r}): was Farandole changed while the job ran?"
        ) from None


JournalFiles: TypeAlias = tuple[int, int]
"""Descriptors of the two files."""


def files_in_memory() -> JournalFiles:
    """Return files that exist as long as a process has them open."""
    return os.memfd_create("farandole-journal-0"), os.memfd_create("farandole-journal-1")


class Journal:
    """Two files, of which the older one is replaced by each state: one of them is complete at any time.

    The files are held open by the launcher, too, and may have no name: a state outlives the process that has written
    it.

    is_durable  each state survives a power failure, and is seen by other machines that share the files' folder
    """

    def __init__(self, descriptors: JournalFiles, identity: JournalIdentity, is_durable: bool = False) -> None:
        self._descriptors, self._identity, self._is_durable = descriptors, identity, is_durable
        self._number = max((number for number, _, _ in self._states()), default=0)

    def write(self, data: bytes) -> None:
        """Replace the older state. Raises OSError when the memory, or the disk, is full."""
        self._number += 1
        descriptor = self._descriptors[self._number % 2]
        identity = json.dumps(asdict(self._identity)).encode()
        head = _HEADER.pack(_MAGIC, self._number, len(identity), len(data)) + identity
        checksum = _CHECKSUM.pack(zlib.crc32(data, zlib.crc32(head)))
        os.ftruncate(descriptor, 0)
        written, length = os.pwritev(descriptor, [checksum, head, data], 0), len(checksum) + len(head) + len(data)
        if written < length:
            raise OSError(f"{written} of {length} bytes of the coordinator's journal were written")
        if self._is_durable:
            os.fdatasync(descriptor)

    def read(self) -> bytes | None:
        """Return the newest complete state; None: there is none, since the job begins.

        Raises:
            JournalError: The journal is damaged, or of another job or version.
        """
        states = self._states()
        if not states:
            sizes = [os.fstat(descriptor).st_size for descriptor in self._descriptors]
            if all(sizes):  # where one is empty, the first coordinator died as it wrote the first state
                raise JournalError(
                    f"the coordinator's journal is damaged: neither of its files, of {sizes[0]} and {sizes[1]} bytes, "
                    "has a complete state"
                )
            return None
        _, found, data = max(states, key=lambda state: state[0])
        if found.job_id != self._identity.job_id:
            raise JournalError(f"the coordinator's journal is of job {found.job_id}, not of {self._identity.job_id}")
        if found.version != self._identity.version:
            raise JournalError(
                f"the coordinator's journal was written by Farandole {found.version}, and this is "
                f"{self._identity.version}: continue with the version that has started the job"
            )
        return data

    def _states(self) -> list[tuple[int, JournalIdentity, bytes]]:
        found = []
        for descriptor in self._descriptors:
            content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            begin = _CHECKSUM.size + _HEADER.size
            if len(content) < begin or _CHECKSUM.unpack_from(content) != (zlib.crc32(content[_CHECKSUM.size :]),):
                continue
            magic, number, identity_bytes, state_bytes = _HEADER.unpack_from(content, _CHECKSUM.size)
            end = begin + identity_bytes
            if magic == _MAGIC and len(content) == end + state_bytes:
                found.append((number, JournalIdentity(**json.loads(content[begin:end])), content[end:]))
        return found
