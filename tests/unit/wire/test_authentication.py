"""The handshake and the sealed frames: what an attacker on the network must not get away with."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, strategies as st

from farandole.errors import AuthenticationError, ProtocolError
from farandole.membership import GenerationId
from farandole.wire import authentication
from farandole.wire.authentication import Handshake, Role, Session, derive_data_key, new_token
from farandole.wire.messages import PROTOCOL_VERSION

TOKEN = new_token()


def shake_hands(dialer: Handshake, listener: Handshake) -> tuple[Session, Session]:
    """Carry the frames of a handshake across; the sessions of dialer and listener."""
    challenge = listener.begin()
    assert challenge is not None
    answer = dialer.receive(challenge)
    assert answer is not None
    welcome = listener.receive(answer)
    assert welcome is not None
    assert dialer.receive(welcome) is None
    assert dialer.session is not None
    assert listener.session is not None
    return dialer.session, listener.session


def new_sessions(token: bytes = TOKEN, job_id: str = "job") -> tuple[Session, Session]:
    return shake_hands(Handshake(Role.DIALER, token, job_id), Handshake(Role.LISTENER, token, job_id))


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


def test_a_dialer_waits_for_the_challenge() -> None:
    assert Handshake(Role.DIALER, TOKEN, "job").begin() is None


@pytest.mark.parametrize(
    ("token", "job_id"), [(new_token(), "job"), (TOKEN, "another job")], ids=["another token", "another job"]
)
def test_a_dialer_with_another_token_or_job_is_refused_before_it_learns_anything(token: bytes, job_id: str) -> None:
    listener = Handshake(Role.LISTENER, TOKEN, "job")
    challenge = listener.begin()
    assert challenge is not None
    answer = Handshake(Role.DIALER, token, job_id).receive(challenge)
    assert answer is not None
    with pytest.raises(AuthenticationError, match="the dialer did not prove the token of job job"):
        listener.receive(answer)
    assert listener.session is None


def test_a_listener_that_only_sends_the_dialers_proof_back_is_refused() -> None:
    dialer, real = Handshake(Role.DIALER, TOKEN, "job"), Handshake(Role.LISTENER, TOKEN, "job")
    challenge = real.begin()
    assert challenge is not None
    answer = dialer.receive(challenge)
    assert answer is not None
    with pytest.raises(AuthenticationError, match="the listener did not prove"):
        dialer.receive(answer[-32:])


def test_an_answer_cannot_be_used_a_second_time() -> None:
    first, second = Handshake(Role.LISTENER, TOKEN, "job"), Handshake(Role.LISTENER, TOKEN, "job")
    challenge = first.begin()
    assert challenge is not None
    answer = Handshake(Role.DIALER, TOKEN, "job").receive(challenge)
    assert answer is not None
    first.receive(answer)
    with pytest.raises(AuthenticationError):
        second.receive(answer)
    with pytest.raises(ProtocolError, match="over"):
        first.receive(answer)


def test_another_version_is_refused_with_both_versions_named(monkeypatch: pytest.MonkeyPatch) -> None:
    challenge = Handshake(Role.LISTENER, TOKEN, "job").begin()
    assert challenge is not None
    monkeypatch.setattr(authentication, "PROTOCOL_VERSION", 99)
    with pytest.raises(ProtocolError, match=f"uses version {PROTOCOL_VERSION} of the protocol, this side version 99"):
        Handshake(Role.DIALER, TOKEN, "job").receive(challenge)


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
    handshake = Handshake(role, TOKEN, "job")
    for payload in garbage:
        with contextlib.suppress(ProtocolError, AuthenticationError):
            handshake.receive(payload)
    assert handshake.session is None


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
