"""The journal of a coordinator: its newest state, from which another one continues when it has died.

Each state replaces the one before. It is written before any message of its decisions is sent; so whatever an agent has
seen is in the journal, and what is not in the journal has been seen by nobody.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import msgspec

import farandole
from farandole.base.membership import Address
from farandole.base.wire.message import PROTOCOL_VERSION
from farandole.base.wire.message_log import MessageLog
from farandole.base.wire.messages import ToAgent
from farandole.errors import FarandoleError
from farandole.job.coordinator.job import AgentRecord, Job, Slot, SlotUse, Worker

FORMAT = 3
"""The number of the format of states, and of a job's folder (launch/job_state.py). Releases with the same number take
over from one another. A new field that has a default is no change: it is missing in older states, and a release that
does not know it ignores it. After any other change raise the number, and add a function to MIGRATIONS."""


def _with_one_record_of_a_death(content: dict[str, Any]) -> dict[str, Any]:
    """Format 2 had two lists: `losses` since the last START, and `lost_members` until their recovery was reported."""
    job = content["state"]["job"]
    number = job["generation"]["id"][2] if job["generation"] else 0
    losses = {each["worker"]: {"sentence": each["worker"], **each} for each in job.pop("lost_members", [])}
    for each in job.get("losses", []):
        name, _, how = each["sentence"].partition(" ")
        known = losses.setdefault(name, {"worker": name, "how": "" if each["dying"] else how})
        known |= {key: each[key] for key in ("sentence", "raised", "exit_code")} | {"number": number}
    job["losses"] = list(losses.values())
    return content


MIGRATIONS: Mapping[int, Callable[[Any], Any]] = {2: _with_one_record_of_a_death}
"""By the number of an older format: the function that turns the content of a state, as `msgspec.msgpack.decode` returns
it, into that of the next format. A format without a function is refused."""

_MAGIC = b"farandl1"
_HEADER = struct.Struct(">8sQIQ")  # magic, number of the state, lengths of the identity and the state
_CHECKSUM = struct.Struct(">I")  # CRC-32 of all the rest


class JournalError(FarandoleError):
    """The journal cannot be used: it is damaged, or of another job or version."""


SOFTWARE = f"{farandole.__version__} (protocol {PROTOCOL_VERSION})"
"""This release, for people."""


class JournalDamaged(JournalError):
    """No state in it is complete."""


class JournalIdentity(msgspec.Struct, frozen=True):
    """What a journal belongs to. `version` is that of the software that has written it, for messages; the `format`
    decides who can read it. The first one, of pickled states, had no number."""

    job_id: str
    version: str = SOFTWARE
    format: int = 1


def why_unreadable(format: int, version: str) -> str:
    """Return why this release cannot read states of this format, written by this version; empty: it can."""
    if format == FORMAT or format in MIGRATIONS:
        return ""
    reads = f"{min((*MIGRATIONS, FORMAT))} to {FORMAT}" if MIGRATIONS else str(FORMAT)
    advice = f"continue with Farandole {version}" + (" or a newer one" if format > FORMAT else "")
    return (
        f"was written by Farandole {version} in format {format}, and this is {SOFTWARE}, which reads {reads}: {advice}"
    )


@dataclass
class AgentSession:
    """The session with an agent, over one connection after the other.

    process    the agent's process, as in AgentHello
    is_apart   as in AgentHello
    journaled  the number of its messages whose consequences are in the journal
    confirmed  the number of those that it knows to be so
    protocol   the version of the protocol on its last connection
    epoch      of the coordinator with which it began, if it began by telling of its workers; its messages to former
               coordinators have other numbers
    """

    process: str
    is_apart: bool
    log: MessageLog[ToAgent]
    journaled: int = 0
    confirmed: int = 0
    protocol: int = PROTOCOL_VERSION
    epoch: int = 0


@dataclass(frozen=True)
class CoordinatorState:
    """The state of a coordinator between two decisions.

    now_s             the time by its clock
    attempt           the newest one for which the store was emptied
    offered, joined   slots by host, as in HostsOffered; of the agents that have joined beside those
    agent_hosts       addresses from which agents have connected
    addresses         at which it listens
    lost              why the state before was lost: the agents are to tell what the job is, and nothing else of it is
                      known; empty: it was not
    """

    job: Job
    now_s: float
    attempt: int
    sessions: Mapping[str, AgentSession]
    offered: Mapping[str, int]
    joined: Mapping[str, int]
    agent_hosts: frozenset[str]
    addresses: tuple[Address, ...]
    lost: str = ""


_PARTS: Mapping[str, Any] = {
    "workers": msgspec.msgpack.Decoder(tuple[str, Worker]),
    "slots": msgspec.msgpack.Decoder(tuple[Slot, SlotUse]),
    "agents": msgspec.msgpack.Decoder(tuple[str, AgentRecord]),
}
"""The mappings of a job that grow with it, and the decoders of their items."""


class _Log(msgspec.Struct, frozen=True):
    handled: int
    confirmed: int
    kept: tuple[ToAgent, ...]


class _Content(msgspec.Struct, frozen=True):
    """An encoded state. `parts` are the items of those mappings of the job, which is without them."""

    state: CoordinatorState
    parts: dict[str, list[msgspec.Raw]]
    beside: msgspec.Raw


def _encode_log(value: object) -> object:
    if isinstance(value, MessageLog):
        return _Log(value.handled, value.confirmed, value.kept)
    raise NotImplementedError(f"{type(value).__name__} cannot be in a state")


def _decode_log(type_: Any, value: object) -> object:
    log = msgspec.convert(value, _Log)
    return MessageLog(log.handled, log.confirmed, log.kept)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_log)
_DECODER = msgspec.msgpack.Decoder(_Content, dec_hook=_decode_log)


class StateEncoder:
    """Encodes one state after the other, each with something `beside` it, as MessagePack: whoever reads a state runs
    nothing that is in it.

    Values of a job are never changed in place. So of a large job only the workers, slots and agents are encoded again
    that have changed since the state before: of 4,096 workers one decision changes a few.
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[Any, tuple[object, msgspec.Raw]]] = {name: {} for name in _PARTS}

    def encode(self, state: CoordinatorState, beside: object) -> bytes:
        """Return the bytes for `decoded`."""
        parts = {name: self._encode_parts(name, getattr(state.job, name)) for name in _PARTS}
        rest = replace(state, job=replace(state.job, workers={}, slots={}, agents={}))
        return _ENCODER.encode(_Content(rest, parts, msgspec.Raw(_ENCODER.encode(beside))))

    def _encode_parts(self, name: str, parts: Mapping[Any, object]) -> list[msgspec.Raw]:
        known = self._known[name]
        encoded = self._known[name] = {}
        for key, part in parts.items():
            former = known.get(key)
            encoded[key] = (
                former
                if former is not None and former[0] is part
                else (part, msgspec.Raw(_ENCODER.encode((key, part))))
            )
        return [data for _, data in encoded.values()]


def decoded(data: bytes) -> tuple[CoordinatorState, msgspec.Raw]:
    """Return the state, and what is beside it, still encoded.

    Raises:
        JournalError: It cannot be decoded.
    """
    try:
        content = _DECODER.decode(data)
        parts: dict[str, Any] = {name: dict(map(_PARTS[name].decode, content.parts[name])) for name in _PARTS}
        return replace(content.state, job=replace(content.state.job, **parts)), content.beside
    except Exception as error:  # noqa: BLE001 - as many as there are ways to differ
        raise JournalError(f"the coordinator's journal cannot be read ({error})") from None


def _migrated(data: bytes, format: int) -> bytes:
    """Return a state of this format in the format of this release. Raises JournalError."""
    while format != FORMAT:
        try:
            data = msgspec.msgpack.encode(MIGRATIONS[format](msgspec.msgpack.decode(data, strict=False)))
        except Exception as error:  # noqa: BLE001 - as many as there are ways to differ
            raise JournalError(
                f"the coordinator's journal, of format {format}, cannot be turned into format {format + 1} ({error!r})"
            ) from None
        format += 1
    return data


JournalFiles: TypeAlias = tuple[int, int]
"""Descriptors of the two files."""


def files_in_memory(content: bytes = b"") -> JournalFiles:
    """Return files, both with this content, that exist as long as a process has them open."""
    files = os.memfd_create("farandole-journal-0"), os.memfd_create("farandole-journal-1")
    for each in files:
        os.pwrite(each, content, 0)
    return files


class Journal:
    """Two files, of which the older one is replaced by each state: one of them is complete at any time.

    The files are held open by the launcher, too, and may have no name: a state outlives the process that has written
    it.

    is_durable  each state survives a power failure, and is seen by other machines that share the files' folder
    """

    def __init__(self, descriptors: JournalFiles, job_id: str, is_durable: bool = False) -> None:
        self._descriptors, self._job_id, self._is_durable = descriptors, job_id, is_durable
        self._number = max((number for number, _, _ in self._states()), default=0)

    def write(self, data: bytes) -> None:
        """Replace the older state. Raises OSError when the memory, or the disk, is full."""
        self._number += 1
        descriptor = self._descriptors[self._number % 2]
        identity = msgspec.json.encode(JournalIdentity(self._job_id, format=FORMAT))
        head = _HEADER.pack(_MAGIC, self._number, len(identity), len(data)) + identity
        checksum = _CHECKSUM.pack(zlib.crc32(data, zlib.crc32(head)))
        written, length = os.pwritev(descriptor, [checksum, head, data], 0), len(checksum) + len(head) + len(data)
        if written < length:
            raise OSError(f"{written} of {length} bytes of the coordinator's journal were written")
        os.ftruncate(descriptor, length)  # only now: a file that was written is never empty, whenever this process dies
        if self._is_durable:
            os.fdatasync(descriptor)

    def read(self) -> bytes | None:
        """Return the newest complete state, in the format of this release; None: there is none, since the job begins.

        Raises:
            JournalError: The journal is damaged, of another job, or of a format that this release cannot read.
        """
        states = self._states()
        if not states:
            sizes = [os.fstat(descriptor).st_size for descriptor in self._descriptors]
            if all(sizes):  # where one is empty, at most the first state was written, of which nobody was told
                raise JournalDamaged(
                    f"the coordinator's journal is damaged: neither of its files, of {sizes[0]} and {sizes[1]} bytes, "
                    "has a complete state"
                )
            return None
        _, found, data = max(states, key=lambda state: state[0])
        if found.job_id != self._job_id:
            raise JournalError(f"the coordinator's journal is of job {found.job_id}, not of {self._job_id}")
        if problem := why_unreadable(found.format, found.version):
            raise JournalError(f"the coordinator's journal {problem}")
        return _migrated(data, found.format)

    def newest(self) -> bytes:
        """Return the content of the file with the state that was the newest when this object was made."""
        descriptor = self._descriptors[self._number % 2]
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)

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
                identity = msgspec.json.decode(content[begin:end], type=JournalIdentity)
                found.append((number, identity, content[end:]))
        return found
