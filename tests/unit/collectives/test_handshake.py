from __future__ import annotations

import msgspec
import pytest

from farandole.errors import ProtocolError
from farandole.membership import GenerationId
from farandole.wire import authentication
from farandole.wire.authentication import (
    INTRODUCTION_LIMIT,
    NONCE_BYTES,
    PROOF_BYTES,
    REPLY_BYTES,
    Introduction,
    Proofs,
    Role,
    acceptor_reply,
    decode_introduction,
    dialer_proof,
    is_dialer_proved,
)

KEY = b"k" * 32
NONCE = b"a" * NONCE_BYTES
INTRODUCTION = Introduction(GenerationId(1, 1, 7, "x"), "w1", "w2", b"d" * NONCE_BYTES)


def test_both_ends_prove_themselves_with_the_same_key() -> None:
    reply = acceptor_reply(KEY, INTRODUCTION, NONCE)
    proof = dialer_proof(KEY, INTRODUCTION, reply)
    assert len(reply) == REPLY_BYTES
    assert proof is not None
    assert len(proof) == PROOF_BYTES
    assert is_dialer_proved(KEY, INTRODUCTION, NONCE, proof)


def test_another_key_proves_nothing_at_either_end() -> None:
    other = b"o" * 32
    assert dialer_proof(KEY, INTRODUCTION, acceptor_reply(other, INTRODUCTION, NONCE)) is None
    proof = dialer_proof(other, INTRODUCTION, acceptor_reply(other, INTRODUCTION, NONCE))
    assert proof is not None
    assert not is_dialer_proved(KEY, INTRODUCTION, NONCE, proof)


def test_the_acceptors_proof_cannot_be_sent_back_as_the_dialers() -> None:
    reply = acceptor_reply(KEY, INTRODUCTION, NONCE)
    assert not is_dialer_proved(KEY, INTRODUCTION, NONCE, reply[NONCE_BYTES:])


@pytest.mark.parametrize(
    "change",
    [
        {"generation": GenerationId(1, 1, 8, "x")},
        {"generation": GenerationId(1, 1, 7, "y")},
        {"generation": GenerationId(2, 1, 7, "x")},
        {"dialer": "w3"},
        {"acceptor": "w3"},
        {"channel": 1},
        {"nonce": b"e" * NONCE_BYTES},
    ],
)
def test_a_proof_holds_for_exactly_one_connection(change: dict[str, object]) -> None:
    other = msgspec.structs.replace(INTRODUCTION, **change)
    reply = acceptor_reply(KEY, INTRODUCTION, NONCE)
    proof = dialer_proof(KEY, INTRODUCTION, reply)
    assert proof is not None
    assert dialer_proof(KEY, other, reply) is None
    assert not is_dialer_proved(KEY, other, NONCE, proof)
    assert INTRODUCTION.announces(other) == ("nonce" in change)


def test_an_introduction_may_arrive_byte_by_byte() -> None:
    text = INTRODUCTION.encode()
    assert all(decode_introduction(text[:end]) is None for end in range(len(text)))
    assert decode_introduction(text) == INTRODUCTION


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n",
        b"F\0",
        INTRODUCTION.encode()[:4] + b"\xff\xff",
        INTRODUCTION.encode()[:4] + b"\x00\x02\xff\xff",
        INTRODUCTION.encode() + b"\0",
        b"Frdd" + (INTRODUCTION_LIMIT).to_bytes(2, "big"),
    ],
)
def test_garbage_is_refused_as_soon_as_it_shows(garbage: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_introduction(garbage)


def test_ids_too_long_to_introduce_are_an_error_at_the_dialer() -> None:
    with pytest.raises(ValueError, match="too long"):
        Introduction(INTRODUCTION.generation, "w" * INTRODUCTION_LIMIT, "w2", b"").encode()


def test_a_recording_of_another_version_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = acceptor_reply(KEY, INTRODUCTION, NONCE)
    monkeypatch.setattr(authentication, "PROTOCOL_VERSION", 99)
    assert dialer_proof(KEY, INTRODUCTION, reply) is None


def test_a_proof_of_one_kind_of_connection_proves_nothing_on_another() -> None:
    """The key is the same, and so are all other fields."""
    control, data = Proofs(KEY, b"control", b"x", NONCE), Proofs(KEY, b"data", b"x", NONCE)
    for role in Role:
        assert control.is_of(role, control.of(role))
        assert not control.is_of(role, data.of(role))
        assert not control.is_of(role, control.of(role.other))
    assert control.of(Role.DIALER) != Proofs(KEY, b"control", b"", b"x" + NONCE).of(Role.DIALER)
