"""The stream that encrypts in memory: what a wrong peer, and an attacker on the path, are told."""

from __future__ import annotations

import datetime
import shutil
from pathlib import Path

import pytest

from farandole.base.wire import encryption
from farandole.base.wire.authentication import Role
from farandole.base.wire.encryption import Certificates, EncryptedStream, EncryptionFailed
from farandole.job.launch.certificates_command import make_certificates
from tests.support.certificates import of_this_process

Ends = tuple[EncryptedStream, EncryptedStream]


def ends(dialer: str = "job", listener: str = "job") -> Ends:
    return (
        EncryptedStream(of_this_process(dialer).context(Role.DIALER), Role.DIALER),
        EncryptedStream(of_this_process(listener).context(Role.LISTENER), Role.LISTENER),
    )


def shake_hands(dialer: EncryptedStream, listener: EncryptedStream) -> None:
    while not (dialer.handshake() and listener.handshake()):
        listener.feed(dialer.outgoing())
        listener.handshake()
        dialer.feed(listener.outgoing())


def read(stream: EncryptedStream, number: int = 100) -> bytes:
    buffer = bytearray(number)
    return bytes(buffer[: stream.read_into(memoryview(buffer))])


def test_what_is_written_comes_out_at_the_other_end_in_pieces_of_any_size() -> None:
    dialer, listener = ends()
    shake_hands(dialer, listener)
    text = bytes(range(256)) * 300
    dialer.write(text)
    encrypted = dialer.outgoing()
    assert text[:64] not in encrypted
    received = b""
    for start in range(0, len(encrypted), 1000):
        listener.feed(encrypted[start : start + 1000])
        received += read(listener, 100_000)
    assert received == text
    assert not listener.has_input
    assert read(listener) == b""


def test_what_was_not_read_is_seen_without_another_byte_from_the_network() -> None:
    dialer, listener = ends()
    shake_hands(dialer, listener)
    dialer.write(b"onetwo")
    listener.feed(dialer.outgoing())
    assert read(listener, 3) == b"one"
    assert listener.has_input
    assert read(listener, 3) == b"two"


def test_a_bit_that_was_changed_on_the_way_ends_the_connection() -> None:
    dialer, listener = ends()
    shake_hands(dialer, listener)
    dialer.write(b"gradients")
    sent = bytearray(dialer.outgoing())
    sent[7] ^= 1
    listener.feed(bytes(sent))
    with pytest.raises(EncryptionFailed, match="bytes were changed on their way"):
        read(listener)


def test_a_record_cannot_be_repeated() -> None:
    dialer, listener = ends()
    shake_hands(dialer, listener)
    dialer.write(b"once")
    sent = dialer.outgoing()
    listener.feed(sent)
    assert read(listener) == b"once"
    listener.feed(sent)
    with pytest.raises(EncryptionFailed, match="changed on their way"):
        read(listener)


def test_certificates_of_another_job_are_refused_at_both_ends() -> None:
    for dialer, listener in (ends("job", "another"), ends("another", "job")):
        with pytest.raises(EncryptionFailed, match="the certificate of the listener is not of this job"):
            shake_hands(dialer, listener)
        listener.feed(dialer.outgoing())
        with pytest.raises(EncryptionFailed, match="the dialer refuses this side's certificate"):
            listener.handshake()


def test_a_dialer_without_a_certificate_is_refused() -> None:
    dialer, listener = ends()
    context = encryption.ssl.SSLContext(encryption.ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, encryption.ssl.CERT_NONE
    dialer._tls = context.wrap_bio(dialer._incoming, dialer._outgoing)
    with pytest.raises(EncryptionFailed, match="the dialer has shown no certificate, or wants one"):
        shake_hands(dialer, listener)


def test_tls_before_version_1_3_is_refused() -> None:
    dialer, listener = ends()
    context = encryption.ssl.SSLContext(encryption.ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, encryption.ssl.CERT_NONE
    context.maximum_version = encryption.ssl.TLSVersion.TLSv1_2
    dialer._tls = context.wrap_bio(dialer._incoming, dialer._outgoing)
    with pytest.raises(EncryptionFailed, match=r"the dialer does not use TLS 1.3 .*give --tls DIR at both ends"):
        shake_hands(dialer, listener)


@pytest.mark.parametrize("role", list(Role))
def test_a_peer_without_tls_is_named_with_what_to_do(role: Role) -> None:
    end = EncryptedStream(of_this_process().context(role), role)
    end.handshake()
    end.feed(b"\0\0\0\x2dfarandol\0\x06" + bytes(40))
    with pytest.raises(EncryptionFailed, match=f"the {role.other.name.lower()} does not use TLS 1.3 .*, or at none"):
        end.handshake()


def test_a_certificate_that_expires_while_the_job_runs_is_named(tmp_path: Path) -> None:
    """Another machine still has it in memory: only its file is checked when a process starts."""
    pytest.importorskip("cryptography")
    make_certificates(tmp_path, 10)
    certificates = Certificates(str(tmp_path))
    make_certificates(tmp_path, 1, datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=2))
    certificates.context(Role.LISTENER).load_cert_chain(tmp_path / "certificate.pem", tmp_path / "key.pem")
    dialer, listener = (EncryptedStream(certificates.context(role), role) for role in Role)
    with pytest.raises(EncryptionFailed, match="the certificate of the listener is not valid now: certificate has exp"):
        shake_hands(dialer, listener)


# Files that change while a job runs -----------------------------------------------------------------------------------


@pytest.fixture
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encryption, "_LOOK_EVERY_S", 0.0)


def connect(dialer: Certificates, listener: Certificates) -> None:
    shake_hands(
        EncryptedStream(dialer.context(Role.DIALER), Role.DIALER),
        EncryptedStream(listener.context(Role.LISTENER), Role.LISTENER),
    )


@pytest.mark.usefixtures("looks_at_once")
def test_a_renewed_certificate_is_used_by_the_next_connection_and_known_to_a_process_with_the_former(
    tmp_path: Path,
) -> None:
    """With the same authority the machines need not change at the same moment."""
    pytest.importorskip("cryptography")
    make_certificates(tmp_path / "here", 10)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    here, there = Certificates(str(tmp_path / "here")), Certificates(str(tmp_path / "there"))
    before = here.context(Role.LISTENER)
    make_certificates(tmp_path / "here", 20)
    assert here.context(Role.LISTENER) is not before
    assert there.context(Role.LISTENER) is there.context(Role.LISTENER), "its files are as they were"
    connect(here, there)
    connect(there, here)


@pytest.mark.usefixtures("looks_at_once")
def test_a_new_authority_counts_once_both_machines_have_it(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    make_certificates(tmp_path / "here", 10)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    here, there = Certificates(str(tmp_path / "here")), Certificates(str(tmp_path / "there"))
    for each in (tmp_path / "here").iterdir():
        each.unlink()
    make_certificates(tmp_path / "here", 10)
    with pytest.raises(EncryptionFailed, match="not of this job"):
        connect(here, there)
    for each in (tmp_path / "here").iterdir():
        shutil.copy(each, tmp_path / "there")
    connect(here, there)


@pytest.mark.usefixtures("looks_at_once")
@pytest.mark.parametrize(
    ("name", "text"), [("certificate.pem", "half a fi"), ("key.pem", ""), ("ca.pem", None)], ids=str
)
def test_files_that_cannot_be_used_leave_the_former_ones_in_use_and_are_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, text: str | None
) -> None:
    """As between two of the writes that replace them."""
    pytest.importorskip("cryptography")
    make_certificates(tmp_path, 10)
    certificates = Certificates(str(tmp_path))
    path = tmp_path / name
    complete = path.read_bytes()
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    connect(certificates, certificates)
    connect(certificates, certificates)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert name in caplog.text
    path.write_bytes(complete)
    before = certificates.context(Role.LISTENER)
    connect(certificates, certificates)
    assert certificates.context(Role.LISTENER) is before, "loaded once"
