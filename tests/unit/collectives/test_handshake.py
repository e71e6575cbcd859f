"""The handshake of data connections: what tells it from that of control connections."""

from __future__ import annotations

import msgspec
import pytest

from farandole.base.membership import GenerationId
from farandole.base.wire.authentication import (
    SUBJECT_LIMIT,
    DialerHandshake,
    Introduction,
    ListenerHandshake,
    Proofs,
    Purpose,
    Role,
    decode_introduction,
)
from farandole.errors import AuthenticationError, ProtocolError

KEY, NONCE = b"k" * 32, b"a" * 32
INTRODUCTION = Introduction(GenerationId(1, 1, 7, "x"), "w1", "w2")


def hello(introduction: Introduction = INTRODUCTION) -> bytes:
    return DialerHandshake(Purpose.DATA, KEY, introduction.encode()).begin()


def heard(data: bytes) -> ListenerHandshake:
    listener = ListenerHandshake(Purpose.DATA)
    for start in range(len(data)):
        listener.feed(data[start : start + 1])
    return listener


def proof_for(listener: ListenerHandshake, dialer: DialerHandshake, key: bytes) -> bytes:
    """The dialer's proof upon the listener's challenge."""
    challenge, proof = listener.challenge(key), b""
    while not proof:
        count = dialer.missing
        proof, challenge = dialer.feed(challenge[:count]), challenge[count:]
    return proof


def take(listener: ListenerHandshake, proof: bytes) -> None:
    listener.feed(proof[:4])
    listener.feed(proof[4:])


def test_an_introduction_may_arrive_byte_by_byte() -> None:
    subject = heard(hello()).subject
    assert subject is not None
    assert decode_introduction(subject) == INTRODUCTION


def test_another_key_proves_nothing_at_the_acceptor() -> None:
    dialer = DialerHandshake(Purpose.DATA, b"o" * 32, INTRODUCTION.encode())
    listener = heard(dialer.begin())
    with pytest.raises(AuthenticationError, match="the dialer did not prove"):
        take(listener, proof_for(listener, dialer, KEY))


@pytest.mark.parametrize(
    "change",
    [
        {"generation": GenerationId(1, 1, 8, "x")},
        {"generation": GenerationId(1, 1, 7, "y")},
        {"generation": GenerationId(2, 1, 7, "x")},
        {"dialer": "w3"},
        {"acceptor": "w3"},
        {"channel": 1},
    ],
)
def test_a_proof_holds_for_exactly_one_connection(change: dict[str, object]) -> None:
    """Whoever is on the path changes the introduction, and passes on everything else."""
    other = msgspec.structs.replace(INTRODUCTION, **change)
    dialer = DialerHandshake(Purpose.DATA, KEY, INTRODUCTION.encode())
    said = dialer.begin()
    beginning = said[4 : len(said) - len(INTRODUCTION.encode())]
    changed = beginning + other.encode()
    listener = heard(len(changed).to_bytes(4, "big") + changed)
    with pytest.raises(AuthenticationError):
        take(listener, proof_for(listener, dialer, KEY))


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n", b"\0\0\xff\xff", hello()[:4] + b"x", hello() + b"\0", b"\0\0\0\0"],
    ids=["HTTP", "length", "name", "more", "empty"],
)
def test_garbage_is_refused_as_soon_as_it_shows(garbage: bytes) -> None:
    assert not ListenerHandshake(Purpose.DATA).could_go_on(garbage)


def test_what_may_become_a_hello_is_waited_for() -> None:
    text = hello()
    for end in range(len(text) + 1):
        assert ListenerHandshake(Purpose.DATA).could_go_on(text[:end])
        assert heard(text[:end]).could_go_on(text[end:]) == (end < len(text))


@pytest.mark.parametrize("subject", [b"", b"\xff\xff", INTRODUCTION.encode() + b"\0", b"\x91" * 1000])
def test_what_is_no_introduction_is_refused(subject: bytes) -> None:
    with pytest.raises(ProtocolError, match="not an introduction"):
        decode_introduction(subject)


def test_ids_too_long_to_introduce_are_an_error_at_the_dialer() -> None:
    with pytest.raises(ValueError, match="too long"):
        Introduction(INTRODUCTION.generation, "w" * SUBJECT_LIMIT, "w2").encode()


def test_a_proof_of_one_kind_of_connection_proves_nothing_on_another() -> None:
    """The key is the same, and so are all other fields."""
    control, data = Proofs(KEY, b"control", b"x", NONCE), Proofs(KEY, b"data", b"x", NONCE)
    for role in Role:
        assert control.is_of(role, control.of(role))
        assert not control.is_of(role, data.of(role))
        assert not control.is_of(role, control.of(role.other))
    assert control.of(Role.DIALER) != Proofs(KEY, b"control", b"", b"x" + NONCE).of(Role.DIALER)
