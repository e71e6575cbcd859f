"""The handshake and the sealed frames: what an attacker on the network must not get away with."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, strategies as st

from farandole.base.membership import GenerationId
from farandole.base.wire import authentication
from farandole.base.wire.authentication import (
    PROOF_BYTES,
    DialerHandshake,
    ListenerHandshake,
    Purpose,
    Role,
    Session,
    derive_data_key,
    new_token,
)
from farandole.base.wire.message import PROTOCOL_VERSION
from farandole.errors import AuthenticationError, ProtocolError

TOKEN = new_token()


def dialing(token: bytes = TOKEN, job: bytes = b"job") -> DialerHandshake:
    return DialerHandshake(Purpose.CONTROL, token, job)


def challenged(dialer: DialerHandshake, token: bytes = TOKEN) -> tuple[ListenerHandshake, bytes]:
    """The listener that has heard the dialer's hello, and its challenge."""
    listener = ListenerHandshake(Purpose.CONTROL)
    assert feed(listener, dialer.begin()) == b""
    return listener, listener.challenge(token, b"job")


def feed(end: DialerHandshake | ListenerHandshake, data: bytes) -> bytes:
    """Pass on all bytes, never more than the end wants; what it returns for the last ones."""
    outgoing = b""
    while data:
        count = end.missing
        outgoing, data = end.feed(data[:count]), data[count:]
    return outgoing


def new_sessions() -> tuple[Session, Session]:
    dialer = dialing()
    listener, challenge = challenged(dialer)
    assert feed(dialer, feed(listener, feed(dialer, challenge))) == b""
    assert dialer.session is not None
    assert listener.session is not None
    return dialer.session, listener.session


def test_a_token_is_a_line_of_text() -> None:
    """An agent reads it as a line, and strips blanks: random bytes would be cut at a newline."""
    for token in (new_token() for _ in range(200)):
        assert token.decode().isalnum()
        assert len(token) == 64


def test_both_ends_that_know_the_token_can_talk_in_both_directions() -> None:
    dialer, listener = new_sessions()
    for text in (b"one", b"", b"three"):
        assert listener.open(dialer.seal(text)) == text
        assert dialer.open(listener.seal(text)) == text


def test_both_ends_know_whom_the_dialer_wants_and_who_answers() -> None:
    dialer = dialing(job=b"")
    listener, challenge = challenged(dialer)
    assert listener.subject == b""
    assert b"job" in challenge
    feed(listener, feed(dialer, challenge))
    assert listener.session is not None


def test_a_dialer_with_another_token_is_refused_before_it_learns_anything() -> None:
    dialer = dialing(new_token())
    listener, challenge = challenged(dialer)
    with pytest.raises(AuthenticationError, match="the dialer did not prove the token of job job"):
        feed(listener, feed(dialer, challenge))
    assert listener.session is None


def test_a_listener_that_only_sends_the_dialers_proof_back_is_refused() -> None:
    dialer = dialing()
    _, challenge = challenged(dialer)
    proof = feed(dialer, challenge)
    with pytest.raises(AuthenticationError, match="the listener did not prove"):
        feed(dialer, proof)


def test_a_recorded_dialer_is_refused() -> None:
    dialer = dialing()
    hello = dialer.begin()
    first, challenge = challenged(dialer)
    proof = feed(dialer, challenge)
    feed(first, proof)
    second = ListenerHandshake(Purpose.CONTROL)
    feed(second, hello)
    second.challenge(TOKEN, b"job")
    with pytest.raises(AuthenticationError):
        feed(second, proof)
    with pytest.raises(ProtocolError, match="over"):
        first.feed(proof)


def test_a_recorded_listener_is_refused() -> None:
    dialer, later = dialing(), dialing()
    listener, challenge = challenged(dialer)
    farewell = feed(listener, feed(dialer, challenge))
    feed(later, challenge)
    with pytest.raises(AuthenticationError):
        feed(later, farewell)


def speaking(monkeypatch: pytest.MonkeyPatch, oldest: int, newest: int) -> None:
    """This release speaks these versions of the protocol from now on."""
    monkeypatch.setattr(authentication, "OLDEST_PROTOCOL_VERSION", oldest)
    monkeypatch.setattr(authentication, "PROTOCOL_VERSION", newest)


@pytest.mark.parametrize(
    ("dialers", "listeners", "agreed"),
    [((4, 6), (5, 8), 6), ((5, 8), (4, 6), 6), ((6, 6), (5, 6), 6), ((3, 5), (5, 9), 5)],
)
def test_two_releases_use_the_newest_version_that_both_speak(
    monkeypatch: pytest.MonkeyPatch, dialers: tuple[int, int], listeners: tuple[int, int], agreed: int
) -> None:
    speaking(monkeypatch, *dialers)
    dialer = dialing()
    hello = dialer.begin()
    speaking(monkeypatch, *listeners)
    listener = ListenerHandshake(Purpose.CONTROL)
    feed(listener, hello)
    challenge = listener.challenge(TOKEN, b"job")
    speaking(monkeypatch, *dialers)
    proof = feed(dialer, challenge)
    speaking(monkeypatch, *listeners)
    farewell = feed(listener, proof)
    speaking(monkeypatch, *dialers)
    feed(dialer, farewell)
    assert dialer.session is not None
    assert listener.session is not None
    assert dialer.session.version == listener.session.version == agreed


@pytest.mark.parametrize(("dialers", "listeners"), [((7, 9), (4, 6)), ((4, 6), (7, 9))])
def test_releases_without_a_common_version_refuse_each_other(
    monkeypatch: pytest.MonkeyPatch, dialers: tuple[int, int], listeners: tuple[int, int]
) -> None:
    speaking(monkeypatch, *dialers)
    dialer = dialing()
    hello = dialer.begin()
    speaking(monkeypatch, *listeners)
    listener = ListenerHandshake(Purpose.CONTROL)
    feed(listener, hello)
    challenge = listener.challenge(TOKEN, b"job")
    speaking(monkeypatch, *dialers)
    expected = rf"uses version {listeners[1]} of the protocol, this side versions {dialers[0]} to {dialers[1]}; install"
    with pytest.raises(ProtocolError, match=expected):
        feed(dialer, challenge)


@pytest.mark.parametrize("is_offer", [True, False])
def test_nobody_on_the_path_makes_two_ends_use_an_older_version(
    monkeypatch: pytest.MonkeyPatch, is_offer: bool
) -> None:
    """Both ends speak 5 to 7. The offer of the dialer, or the answer of the listener, says 6 when it arrives."""
    speaking(monkeypatch, 5, 7)

    def lowered(greeting: bytes) -> bytes:
        return greeting.replace(b"farandol\x00\x07", b"farandol\x00\x06", 1)

    dialer, listener = dialing(), ListenerHandshake(Purpose.CONTROL)
    hello = dialer.begin()
    feed(listener, lowered(hello) if is_offer else hello)
    challenge = listener.challenge(TOKEN, b"job")
    proof = feed(dialer, challenge if is_offer else lowered(challenge))
    with pytest.raises(AuthenticationError, match="did not prove the token"):
        feed(listener, proof)
    assert listener.session is None


def test_another_version_is_refused_with_both_versions_named_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    dialer = dialing()
    hello = dialer.begin()
    speaking(monkeypatch, 99, 99)
    listener = ListenerHandshake(Purpose.CONTROL)
    feed(listener, hello)
    challenge = listener.challenge(TOKEN, b"job")
    with pytest.raises(ProtocolError, match=f"uses version {PROTOCOL_VERSION} of the protocol, this side version 99"):
        listener.check_version()
    with pytest.raises(ProtocolError, match="uses version"):
        feed(listener, bytes([0, 0, 0, PROOF_BYTES]) + bytes(PROOF_BYTES))
    monkeypatch.undo()
    with pytest.raises(ProtocolError, match=f"uses version 99 of the protocol, this side version {PROTOCOL_VERSION}"):
        feed(dialer, challenge)


def test_a_version_that_was_changed_on_the_way_proves_nothing() -> None:
    """Whoever is on the path cannot make two ends use an older version of the protocol: there is none, and each proof
    is about the version of the end that computes it."""
    dialer = dialing()
    listener, challenge = challenged(dialer)
    older = challenge.replace(PROTOCOL_VERSION.to_bytes(2, "big"), (PROTOCOL_VERSION - 1).to_bytes(2, "big"), 1)
    with pytest.raises(ProtocolError, match="uses version"):
        feed(dialer, older)
    assert listener.session is None


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x02\x00", b"\x15\x03\x03\x00\x02"], ids=["hello", "alert"])
def test_tls_at_one_end_only_is_named(data: bytes) -> None:
    for end in (dialing(), ListenerHandshake(Purpose.CONTROL)):
        with pytest.raises(ProtocolError, match="uses TLS, and this side does not: give --tls DIR at both ends"):
            feed(end, data)


def test_a_changed_frame_is_refused() -> None:
    dialer, listener = new_sessions()
    sealed = dialer.seal(b"pay 1")
    with pytest.raises(AuthenticationError, match="frame 0"):
        listener.open(sealed.replace(b"1", b"9", 1))


def test_a_frame_cannot_be_replayed_skipped_or_reflected() -> None:
    dialer, listener = new_sessions()
    first, second, third = (dialer.seal(b"x") for _ in range(3))
    with pytest.raises(AuthenticationError):
        dialer.open(first)
    listener.open(first)
    for wrong in (first, third):
        with pytest.raises(AuthenticationError):
            listener.open(wrong)
    assert listener.open(second) == b"x"


def test_a_frame_of_one_connection_is_refused_on_another() -> None:
    (dialer, _), (_, other_listener) = new_sessions(), new_sessions()
    with pytest.raises(AuthenticationError):
        other_listener.open(dialer.seal(b"x"))


@given(garbage=st.lists(st.binary(max_size=120), min_size=1, max_size=3), role=st.sampled_from(list(Role)))
def test_garbage_never_makes_a_session(garbage: list[bytes], role: Role) -> None:
    end = dialing() if role is Role.DIALER else ListenerHandshake(Purpose.CONTROL)
    for payload in garbage:
        with contextlib.suppress(ProtocolError, AuthenticationError):
            feed(end, payload)
            if isinstance(end, ListenerHandshake) and end.subject is not None:
                end.challenge(TOKEN)
    assert end.session is None


@given(garbage=st.binary(max_size=80))
def test_garbage_is_never_opened(garbage: bytes) -> None:
    _, listener = new_sessions()
    with pytest.raises(AuthenticationError):
        listener.open(garbage)


def test_data_keys_differ_by_token_and_by_every_part_of_the_generation() -> None:
    generations = [GenerationId(*parts) for parts in ((1, 1, 1, "a"), (2, 1, 1, "a"), (1, 2, 1, "a"))]
    generations += [GenerationId(1, 1, 2, "a"), GenerationId(1, 1, 1, "b")]
    keys = {derive_data_key(token, each) for each in generations for token in (TOKEN, b"another token")}
    assert len(keys) == 10
    assert derive_data_key(TOKEN, generations[0]) == derive_data_key(TOKEN, GenerationId(1, 1, 1, "a"))


def test_tokens_are_random() -> None:
    assert len({new_token() for _ in range(10)}) == 10
