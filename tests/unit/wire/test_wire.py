"""Frames and messages: nothing but exactly a valid message gets through, however the bytes arrive."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from farandole.base.membership import DataAddress, GenerationId, Peer, Placement
from farandole.base.wire.frames import (
    AGENT_MESSAGES,
    TO_AGENT,
    TO_WORKER,
    WORKER_MESSAGES,
    FrameBuffer,
    decode,
    encode,
    frame,
)
from farandole.base.wire.link_messages import Abort, Hello, Ready, Start
from farandole.base.wire.message import Message
from farandole.base.wire.messages import ForwardToWorkers, FromWorker, Spawn, StartWorkers
from farandole.errors import ProtocolError

PEER = Peer("w1", 1, DataAddress("127.0.0.1", 4000))
START = Start(GenerationId(1, 1, 2, "n"), Placement(0, 2, 0, 2, 0, 1), PEER, PEER, bootstrap=True)


@given(
    payloads=st.lists(st.binary(max_size=40), max_size=8),
    cuts=st.lists(st.integers(min_value=1, max_value=60), min_size=1),
)
def test_frames_come_out_whole_however_the_stream_is_cut(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(frame(payload) for payload in payloads)
    buffer = FrameBuffer(limit=40)
    received = []
    while stream:
        for cut in cuts:
            received += buffer.feed(stream[:cut])
            stream = stream[cut:]
    assert received == payloads


def test_an_oversized_frame_is_refused_at_its_announcement() -> None:
    buffer = FrameBuffer(limit=8)
    assert buffer.feed(frame(b"x" * 8)) == [b"x" * 8]
    with pytest.raises(ProtocolError, match="9 bytes was announced, at most 8"):
        buffer.feed(frame(b"x" * 9)[:4])


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (WORKER_MESSAGES, Hello("w1", "s", 7, 1, DataAddress("127.0.0.1", 80))),
        (TO_WORKER, START),
        (AGENT_MESSAGES, FromWorker("w1", Ready(3))),
        (TO_AGENT, ForwardToWorkers(("w1", "w2"), Abort(4, "lost w3"))),
        (TO_AGENT, StartWorkers({"w1": START})),
    ],
)
def test_a_message_arrives_as_it_was_sent(decoder: msgspec.msgpack.Decoder[Message], message: Message) -> None:
    assert decode(decoder, encode(message)) == message


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x82\xa4type\xa5Ready\xa6number\xa2\xff\xfe", id="text that is no UTF-8"),
        pytest.param(msgspec.msgpack.encode({"type": "Ready", "number": 1, "more": 2}), id="an unknown field"),
        pytest.param(msgspec.msgpack.encode({"type": "Ready", "number": "1"}), id="a wrong type"),
        pytest.param(encode(Ready(1)) + b"\x00", id="a tail"),
        pytest.param(encode(Spawn("w1", 0)), id="a message of somebody else"),
    ],
)
def test_what_is_not_exactly_a_valid_message_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a valid message"):
        decode(WORKER_MESSAGES, payload)


@given(garbage=st.binary(max_size=200))
def test_garbage_is_refused_with_a_protocol_error_and_nothing_else(garbage: bytes) -> None:
    decoders: list[msgspec.msgpack.Decoder[Any]] = [WORKER_MESSAGES, TO_WORKER, AGENT_MESSAGES, TO_AGENT]
    for decoder in decoders:
        with contextlib.suppress(ProtocolError):
            decode(decoder, garbage)
    with contextlib.suppress(ProtocolError):
        FrameBuffer(limit=100).feed(garbage)
