"""Everything that decodes bytes of others, without sockets. Each target gets one input, and may only raise the error
that its callers expect."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from farandole.base.config import JobConfig
from farandole.base.liveness.heartbeats import HEARTBEAT_ID_BYTES, HeartbeatSeal
from farandole.base.membership import GenerationId
from farandole.base.wire import frames
from farandole.base.wire.authentication import (
    DialerHandshake,
    Introduction,
    ListenerHandshake,
    Purpose,
    Role,
    Session,
    decode_introduction,
)
from farandole.base.wire.frames import WORKER_FRAME_LIMIT, FrameBuffer, decode, encode, frame
from farandole.base.wire.messages import AgentHello, FromWorker
from farandole.errors import AuthenticationError, ConfigError, ProtocolError
from farandole.job.coordinator.control_requests import status_of
from farandole.job.coordinator.decide import decide, next_deadline
from farandole.job.coordinator.job import new_job
from farandole.job.coordinator.store_connection import MAGIC, Query, StoreConnection
from farandole.job.coordinator.store_server import StoreServer
from farandole.job.coordinator.transition import AgentConnected, AgentReported, Log, SendAgent
from farandole.job.engines.host_list import parse_host
from tests.fuzz.inputs import mutated, pieces, valid_messages

Target = Callable[[bytes], None]

_TOKEN, _KEY = b"t" * 64, b"k" * 32

_DECODERS = (
    frames.WORKER_MESSAGES,
    frames.TO_WORKER,
    frames.AGENT_MESSAGES,
    frames.CLIENT_MESSAGES,
    frames.TO_CLIENT,
    frames.GUARD_MESSAGES,
    frames.CALL_RECEIVED,
    frames.DIALERS_MESSAGES,
    frames.TO_AGENT,
)


class Decoding:
    """The targets, and the valid inputs from which theirs are made."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._messages = valid_messages(self._random)
        introduction = Introduction(GenerationId(1, 1, 1, "n"), "w0", "w1").encode()
        dialer, listener = DialerHandshake(Purpose.DATA, _KEY, introduction), ListenerHandshake(Purpose.DATA)
        hello = dialer.begin()
        _feed_all(listener, hello)
        challenge = listener.challenge(_KEY, b"job")
        proof = _feed_all(dialer, challenge)
        seal = HeartbeatSeal(_TOKEN, bytes(HEARTBEAT_ID_BYTES), Role.LISTENER)
        self._heartbeat = seal.seal(1, 0)
        self.targets: dict[str, tuple[Target, list[bytes]]] = {
            "messages": (self._decode, self._messages),
            "frames": (self._feed, [frame(each) for each in self._messages]),
            "a listener's handshake": (self._listen, [hello, hello + proof, challenge]),
            "a dialer's handshake": (self._dial, [challenge, challenge + proof]),
            "sealed frames": (self._open, [Session(_KEY, _KEY).seal(each) for each in self._messages]),
            "introductions": (self._introduce, [introduction]),
            "heartbeats": (self._beat, [self._heartbeat]),
            "hosts": (self._host, [b"localhost:2", b"a", b"10.0.0.1:4"]),
            "requests to the store": (self._ask_store, store_requests()),
            "messages of an agent that has proved the token": (self._report, self._messages),
        }
        self._loop = asyncio.new_event_loop()
        self._store = StoreServer(lambda _: None)
        self._job, self._now_s = new_job(JobConfig(num_proc=2, max_np=4), "job"), 0.0

    def close(self) -> None:
        self._store.close()
        self._loop.close()

    def run(self, inputs: int) -> dict[str, int]:
        """Give each target its share of the inputs. Returns how many it refused."""
        refused = {}
        for name, (target, valid) in self.targets.items():
            refused[name] = 0
            for _ in range(inputs // len(self.targets)):
                data = self._random.choice(valid)
                if target != self._report or self._random.random() < 0.2:  # what an agent sends is mostly well formed
                    data = mutated(data, valid, self._random)
                try:
                    target(data)
                except (ProtocolError, AuthenticationError, ConfigError):
                    refused[name] += 1
                except BaseException as error:
                    shown = data.hex() if len(data) < 200 else f"{data[:100].hex()}... ({len(data)} bytes)"
                    raise AssertionError(f"{name}: {type(error).__name__} for the input {shown}") from error
        return refused

    def _decode(self, data: bytes) -> None:
        decode(self._random.choice(_DECODERS), data)

    def _feed(self, data: bytes) -> None:
        buffer = FrameBuffer(WORKER_FRAME_LIMIT)
        for piece in pieces(data, self._random):
            assert buffer.missing > 0
            for payload in buffer.feed(piece):
                with contextlib.suppress(ProtocolError):
                    decode(frames.WORKER_MESSAGES, payload)

    def _listen(self, data: bytes) -> None:
        ListenerHandshake(Purpose.DATA).could_go_on(data)
        listener = ListenerHandshake(Purpose.DATA)
        _feed_all(listener, data, _KEY)
        assert listener.session is None, "a proof of another connection was accepted"

    def _dial(self, data: bytes) -> None:
        dialer = DialerHandshake(Purpose.DATA, _KEY, b"")
        dialer.begin()
        _feed_all(dialer, data)
        assert dialer.session is None, "a listener without the key was accepted"

    def _open(self, data: bytes) -> None:
        session = Session(_KEY, bytes(32))
        session.open(data)
        raise AssertionError("a frame with the MAC of another key was accepted")

    def _introduce(self, data: bytes) -> None:
        decode_introduction(data)

    def _beat(self, data: bytes) -> None:
        seal = HeartbeatSeal(_TOKEN, bytes(HEARTBEAT_ID_BYTES), Role.DIALER)
        assert seal.open(data) is None or data == self._heartbeat

    def _host(self, data: bytes) -> None:
        parse_host(data.decode("utf-8", "backslashreplace"))

    def _ask_store(self, data: bytes) -> None:
        asyncio.set_event_loop(self._loop)

        async def ask() -> None:
            connection = StoreConnection(self._store)
            connection.connection_made(_NoTransport())
            connection.data_received(HELLO_TO_STORE)
            for piece in pieces(data, self._random):
                connection.data_received(piece)
            connection.close()

        self._loop.run_until_complete(ask())
        if self._store.table._bytes > 1 << 20:
            self._store.clear()

    def _report(self, data: bytes) -> None:
        """Whatever an agent sends: the coordinator decides, and goes on."""
        message = decode(frames.AGENT_MESSAGES, data)
        if self._job.ending is not None or self._random.random() < 0.001:
            self._job = new_job(JobConfig(num_proc=2, max_np=4), "job")
        if not self._job.agents:
            self._job, _ = decide(self._job, [AgentConnected("a", "host", 4)], self._now_s)
        self._now_s += self._random.choice((0.0, 0.1, 10.0))
        if isinstance(message, FromWorker):
            worker = self._random.choice(list(self._job.workers) or ["w0"])
            message = msgspec.structs.replace(message, worker=worker)
        if not isinstance(message, AgentHello):
            self._job, actions = decide(self._job, [AgentReported("a", message)], self._now_s)
            for action in actions:
                if isinstance(action, Log):
                    json.dumps(action.event.fields())
                    action.event.line()
                elif isinstance(action, SendAgent):
                    encode(action.message)
            next_deadline(self._job)
            status_of(self._job, self._now_s, {})


def _feed_all(end: DialerHandshake | ListenerHandshake, data: bytes, key: bytes | None = None) -> bytes:
    """Pass on all bytes, as far as the end wants them. Returns what it said last. With a key, a listener goes on."""
    outgoing, has_answered = b"", False
    while data:
        count = end.missing
        outgoing, data = end.feed(data[:count]), data[count:]
        if key is not None and isinstance(end, ListenerHandshake) and end.subject is not None and not has_answered:
            end.challenge(key)
            has_answered = True
    return outgoing


class _NoTransport(asyncio.Transport):
    """Takes what is written, and keeps nothing."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return _NoSocket() if name == "socket" else ("127.0.0.1", 1)

    def write(self, data: Any) -> None:
        pass

    def abort(self) -> None:
        pass


class _NoSocket:
    def setsockopt(self, *_: int) -> None:
        pass


HELLO_TO_STORE = bytes([Query.VALIDATE]) + MAGIC.to_bytes(4, "little")


def store_requests() -> list[bytes]:
    """Return valid requests of all kinds, after the first number."""

    def text(data: bytes) -> bytes:
        return len(data).to_bytes(8, "little") + data

    def number(value: int) -> bytes:
        return value.to_bytes(8, "little", signed=True)

    key, value = text(b"key"), text(b"5")
    bodies = {
        Query.SET: key + value,
        Query.COMPARE_SET: key + value + value,
        Query.GET: key,
        Query.ADD: key + number(7),
        Query.CHECK: number(2) + key + text(b"other"),
        Query.WAIT: number(1) + key,
        Query.COUNT_KEYS: b"",
        Query.DELETE_KEY: key,
        Query.APPEND: key + value,
        Query.MULTI_GET: number(1) + key,
        Query.MULTI_SET: number(1) + key + value,
        Query.CANCEL_WAIT: b"",
        Query.PING: b"1234",
        Query.QUEUE_PUSH: key + value,
        Query.QUEUE_POP: key,
        Query.QUEUE_LENGTH: key,
        Query.LIST_KEYS: b"",
        Query.BARRIER: key + number(2),
    }
    return [bytes([kind]) + body for kind, body in bodies.items()]


@contextlib.contextmanager
def bounded_memory(most_bytes: int) -> Iterator[None]:
    """Fail when the block needs more memory than that, for a moment or for good."""
    before = _resident_bytes()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_mapped_bytes() + (1 << 30), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    grown = _resident_bytes() - before
    assert grown < most_bytes, f"the memory has grown by {grown} bytes"


def _mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
