"""TLS 1.3 between the processes of a job: its certificates, and a stream that encrypts in memory. channel.py moves its
bytes for control connections, collectives/encrypted_socket.py for tensors.

A job has a certificate authority of its own (`farandole certificates`), and one certificate, which all its processes
use: a certificate that this authority has signed is one of the job, whatever host names it contains. Inside of TLS both
ends prove the token as without it.

The stream works in memory, not on the socket: a read of the socket takes many records at once instead of a half one
(of 16 kB), a descriptor can be handed to another process, and another thread can shut the socket down safely.
"""

from __future__ import annotations

import logging
import ssl
import stat
import threading
from pathlib import Path
from typing import cast

from farandole.base.machine import now_s
from farandole.base.wire.authentication import Role
from farandole.base.wire.user_secret import may_others_read
from farandole.errors import ConfigError

AUTHORITY, CERTIFICATE, KEY = "ca.pem", "certificate.pem", "key.pem"
"""The files of a folder of certificates. The authority's key, ca-key.pem, is needed for new certificates only."""

_ALERTS_OF_THE_OTHER_SIDE = ("UNKNOWN_CA", "CERTIFICATE_EXPIRED", "BAD_CERTIFICATE", "CERTIFICATE_UNKNOWN")
_LOOK_EVERY_S = 1.0  # at the files, at most: strangers' connections must not cost a reader of files
_EXPIRED, _NOT_YET_VALID = 10, 9  # X509_V_ERR_CERT_HAS_EXPIRED, X509_V_ERR_CERT_NOT_YET_VALID (OpenSSL, x509_vfy.h)


logger = logging.getLogger("farandole")


class EncryptionFailed(ConnectionError):
    """A TLS connection cannot be made, or a record on it was changed on its way; the message says what to do."""


class Certificates:
    """The certificates of a job, loaded from a folder and verified. For any number of connections and threads.

    A job may outlive its certificate: new connections use the files as they are then. While these are unsuitable, as
    between two of the writes that replace them, the former ones are used.

    Raises ConfigError for a missing or unsuitable file, for a private key that others can read, and for a certificate
    that has expired or that the folder's authority has not signed.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._next_look_s = now_s() + _LOOK_EVERY_S
        self._refused: _Stamps | None = None  # the files that could not be used, for one warning
        self._stamps, self._contexts = _load(Path(folder))

    def context(self, role: Role) -> ssl.SSLContext:
        """Return the settings for the end of a connection with this role."""
        if now_s() >= self._next_look_s:
            with self._lock:
                self._renew()
        return self._contexts[role]

    def _renew(self) -> None:
        """Load the files anew if they have changed."""
        if now_s() < self._next_look_s:
            return  # another thread has done so meanwhile
        self._next_look_s = now_s() + _LOOK_EVERY_S
        stamps = _stamps(Path(self.folder))
        if stamps == self._stamps:
            return
        try:
            self._stamps, self._contexts = _load(Path(self.folder))
        except ConfigError as error:
            if stamps != self._refused:
                logger.warning("the former certificates are used, since the new ones are not suitable: %s", error)
            self._refused = stamps
        else:
            logger.info("new connections use the new certificates in %s", self.folder)


_Stamps = tuple[tuple[int, int, int] | None, ...]
_Contexts = dict[Role, ssl.SSLContext]


def _stamps(folder: Path) -> _Stamps:
    """Return what changes when one of the files is replaced or written."""
    stamps = list[tuple[int, int, int] | None]()
    for name in (AUTHORITY, CERTIFICATE, KEY):
        try:
            status = (folder / name).stat()
        except OSError:
            stamps.append(None)
        else:
            stamps.append((status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(stamps)


def _load(folder: Path) -> tuple[_Stamps, _Contexts]:
    """Load the files, and verify that two ends which use them can connect. Raises ConfigError."""
    stamps = _stamps(folder)  # first: what is written meanwhile is loaded at the next look
    _check_folder(folder)
    for name in (AUTHORITY, CERTIFICATE, KEY):
        _check_file(folder / name, is_secret=name == KEY)
    contexts = {role: _context(folder, role) for role in Role}
    _check_against_itself(folder, contexts)
    return stamps, contexts


def _context(folder: Path, role: Role) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if role is Role.LISTENER else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if role is Role.LISTENER:
        context.num_tickets = 0  # nothing is resumed, and a ticket would wake the dialer without data
    try:
        context.load_verify_locations(folder / AUTHORITY)
        context.load_cert_chain(folder / CERTIFICATE, folder / KEY, password=_no_password)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--tls {folder}: {AUTHORITY}, {CERTIFICATE} or {KEY} is not valid, or the key is not that of the "
            f"certificate ({_reason(error)}); make new ones with: farandole certificates {folder}"
        ) from None
    return context


def _check_against_itself(folder: Path, contexts: _Contexts) -> None:
    """Connect two ends in memory, each of which verifies the other's certificate."""
    dialer, listener = (EncryptedStream(contexts[role], role) for role in (Role.DIALER, Role.LISTENER))
    try:
        while not (dialer.handshake() and listener.handshake()):
            listener.feed(dialer.outgoing())
            listener.handshake()
            dialer.feed(listener.outgoing())
    except EncryptionFailed as error:
        raise ConfigError(
            f"--tls {folder}: its certificate cannot be used: {error}; make a new one with: "
            f"farandole certificates {folder}"
        ) from None


def load_certificates(folder: str | None) -> Certificates | None:
    """Return the certificates in a folder; None without one. Raises ConfigError as Certificates does."""
    return Certificates(folder) if folder else None


def _check_folder(folder: Path) -> None:
    try:
        mode = folder.stat().st_mode
    except OSError as error:
        raise ConfigError(
            f"--tls {folder}: the folder cannot be read: {error.strerror}; make it with `farandole certificates "
            f"{folder}`, and copy it to each machine of the job"
        ) from None
    if mode & 0o022 and not mode & stat.S_ISVTX:
        raise ConfigError(f"--tls: others may write into {folder}, and so replace its files: chmod 700 {folder}")


def _check_file(path: Path, *, is_secret: bool) -> None:
    try:
        with path.open("rb") as file:
            may_read = may_others_read(file.fileno())
    except OSError as error:
        raise ConfigError(
            f"--tls {path.parent}: {path.name} cannot be read: {error.strerror}; make the files with `farandole "
            f"certificates {path.parent}`, and copy the folder to each machine of the job"
        ) from None
    if is_secret and may_read:
        raise ConfigError(f"--tls {path.parent}: the private key can be read by others: chmod 600 {path}")


def _no_password() -> str:
    raise ValueError("the private key is encrypted with a password")


class EncryptedStream:
    """One end of a TLS connection, without a socket: bytes of the network in and out, bytes of the application in and
    out. For one thread at a time. Methods raise EncryptionFailed; the connection must be closed then."""

    def __init__(self, context: ssl.SSLContext, role: Role) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._is_listener = role is Role.LISTENER
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=self._is_listener)
        self._is_open = False

    def feed(self, data: bytes | memoryview) -> None:
        """Take bytes that came from the network."""
        self._incoming.write(data)

    def outgoing(self) -> bytes:
        """Return the bytes that must be sent over the network now."""
        return self._outgoing.read()

    @property
    def has_input(self) -> bool:
        """True when bytes have been fed that were not returned yet; they may be a part of a record only."""
        return self._tls.pending() > 0 or self._incoming.pending > 0

    def handshake(self) -> bool:
        """Go on with the handshake. Return whether it is complete on this side; send outgoing() in any case."""
        if not self._is_open:
            try:
                self._tls.do_handshake()
                self._is_open = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                raise EncryptionFailed(self._explained(error)) from None
        return self._is_open

    def write(self, data: bytes | memoryview) -> None:
        """Encrypt bytes, which outgoing() then returns."""
        try:
            self._tls.write(data)
        except ssl.SSLError as error:
            raise EncryptionFailed(self._explained(error)) from None

    def read_into(self, buffer: memoryview) -> int:
        """Fill the buffer, as far as there is something, and return the number of bytes; 0: none yet."""
        count = 0
        try:
            while count < len(buffer):
                count += cast(int, self._tls.read(len(buffer) - count, buffer[count:]))  # typeshed: always bytes
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            if not count:
                raise EncryptionFailed(self._explained(error)) from None
        return count

    def _explained(self, error: ssl.SSLError) -> str:
        """Return what has happened and what to do."""
        peer = "dialer" if self._is_listener else "listener"
        if isinstance(error, ssl.SSLCertVerificationError):
            if error.verify_code in (_EXPIRED, _NOT_YET_VALID):
                return f"the certificate of the {peer} is not valid now: {error.verify_message}"
            return (
                f"the certificate of the {peer} is not of this job ({error.verify_message}); all machines need a copy "
                f"of one folder of `farandole certificates`"
            )
        reason = error.reason or ""
        if self._is_open and reason == "DECRYPTION_FAILED_OR_BAD_RECORD_MAC":
            return "bytes were changed on their way"
        if any(alert in reason for alert in _ALERTS_OF_THE_OTHER_SIDE):
            return (
                f"the {peer} refuses this side's certificate ({reason}); all machines need a copy of one folder of "
                "`farandole certificates`, with a certificate that is valid now"
            )
        if reason in ("CERTIFICATE_REQUIRED", "PEER_DID_NOT_RETURN_A_CERTIFICATE", "TLSV13_ALERT_CERTIFICATE_REQUIRED"):
            return f"the {peer} has shown no certificate, or wants one"
        if not self._is_open:
            return f"the {peer} does not use TLS 1.3 ({reason or error}); give --tls DIR at both ends, or at none"
        return _reason(error)


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error)
