"""A data socket with TLS, with the methods of a non-blocking socket that dialer.py, ring_builder.py, connection_pair.py
and point_to_point.py use; and the few functions in which the two kinds differ.

After the handshake of TLS both ends tell each other, inside of TLS, the keys of sealed_records.py, which then carries
the bytes; where one of them cannot, TLS does.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

from farandole.base.wire.authentication import SUBJECT_LIMIT, TLS_RECORD, Role
from farandole.base.wire.encryption import Certificates, EncryptedStream, EncryptionFailed

if TYPE_CHECKING:
    from farandole.training.collectives.sealed_records import SealedRecords

PIECE = 256 << 10
"""The most bytes that are encrypted at once: a larger piece leaves the core's cache before the kernel reads it."""

_SMALL_BYTES = 16 << 10  # buffers that are encrypted together, which copies them

_IN_TLS, _SEALED = b"\0", b"\1"  # what an end offers, in front of its key
_OFFER_BYTES = 33  # with the key
_TLS_HEADER_BYTES, _TLS_LONGEST = 5, (1 << 14) + 256  # of a record (RFC 8446, section 5.2)


class _Scratch(threading.local):
    """A buffer for received bytes, one for each thread: every read passes all of them on."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(PIECE))


_scratch = _Scratch()


class EncryptedSocket:
    """A connected socket, or one that connects, with TLS on it. `handshake()` until it returns True, then the rest.

    It is for one thread at a time, except shutdown(). Errors are those of a socket, and EncryptionFailed, a
    ConnectionError. The end of the connection looks as on the socket: peers end without a farewell of TLS, and whoever
    uses the socket knows how many bytes must come.

    A call of send() or sendmsg() that raised BlockingIOError must be repeated with the same bytes: they are encrypted
    already, and a part of them may be on its way.
    """

    def __init__(self, raw: socket.socket, certificates: Certificates, role: Role) -> None:
        self.raw = raw
        self._stream = EncryptedStream(certificates.context(role), role)
        self._unsent = memoryview(b"")  # encrypted
        self._accepted = 0  # the bytes of the application in it
        self._peeked = bytearray()
        self.has_begun = False  # the handshake
        self._is_ready = False
        self._record = bytearray()  # of TLS, received in part
        self._own_key = b""
        self._offer = bytearray()  # of the other side
        self._sealed: SealedRecords | None = None

    def handshake(self) -> bool:
        """Go on with the handshake without waiting, and return whether it is complete. Call it again when the socket
        becomes readable. Raises OSError when it fails, or the other side is gone."""
        self.has_begun = True
        while not self._is_ready:
            try:
                self._is_ready = self._stream.handshake() and self._agree()
            except EncryptionFailed:
                with contextlib.suppress(OSError):
                    self._send_handshake()  # an alert, which tells the other side why
                raise
            self._send_handshake()
            try:
                if not self._is_ready and not self._feed_record():
                    raise ConnectionError("the other side closed the connection during the TLS handshake")
            except BlockingIOError:
                return False
        return True

    def _agree(self) -> bool:
        """Tell the other side the key of this one, and return whether its answer is there."""
        # It brings a package that only these connections need.
        from farandole.training.collectives.sealed_records import CAN_SEAL, SealedRecords, new_key

        if not self._own_key:
            self._own_key = new_key()
            self._stream.write((_SEALED if CAN_SEAL else _IN_TLS) + self._own_key)
        room = memoryview(bytearray(_OFFER_BYTES - len(self._offer)))
        self._offer += room[: self._stream.read_into(room)]
        if len(self._offer) < _OFFER_BYTES:
            return False
        if self._offer[:1] == _SEALED and CAN_SEAL:
            self._sealed = SealedRecords(self._own_key, bytes(self._offer[1:]))
        return True

    @property
    def has_input(self) -> bool:
        """True when there may be bytes to read although the socket is not readable."""
        return bool(self._peeked) or (self._stream if self._sealed is None else self._sealed).has_input

    def recv_into(self, buffer: memoryview) -> int:
        """Receive up to `len(buffer)` bytes; 0: the other side has ended. Raises BlockingIOError as a socket does."""
        if self._peeked:
            count = min(len(buffer), len(self._peeked))
            buffer[:count] = self._peeked[:count]
            del self._peeked[:count]
            return count
        if self._sealed is not None:
            return self._sealed.receive(self.raw, buffer)
        while not (count := self._stream.read_into(buffer)):
            if not self._feed():
                return 0
        return count

    def recv(self, nbytes: int) -> bytes:
        """Return up to `nbytes` bytes, as recv_into()."""
        buffer = bytearray(nbytes)
        return bytes(buffer[: self.recv_into(memoryview(buffer))])

    def peek(self, nbytes: int) -> bytes:
        """Return up to `nbytes` bytes without consuming them. Raises as recv_into()."""
        peeked, self._peeked = self._peeked, bytearray()
        try:
            while len(peeked) < nbytes and (more := self.recv(nbytes - len(peeked))):
                peeked += more
        except OSError:
            if not peeked:
                raise
        finally:
            self._peeked = peeked
        return bytes(peeked[:nbytes])

    def send(self, data: bytes | memoryview) -> int:
        """Send some of the bytes, and return how many."""
        return self.sendmsg([memoryview(data)])

    def sendmsg(self, buffers: Iterable[memoryview]) -> int:
        """Send some of the bytes in the buffers, and return how many."""
        if not self._unsent:
            piece = _first_piece(buffers)
            if not piece:
                return 0
            if self._sealed is not None:
                self._unsent = self._sealed.seal(piece)
            else:
                self._stream.write(piece)
                self._unsent = memoryview(self._stream.outgoing())
            self._accepted = len(piece)
        while self._unsent:
            self._unsent = self._unsent[self.raw.send(self._unsent) :]
        accepted, self._accepted = self._accepted, 0
        return accepted

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self.raw.fileno()

    def setblocking(self, flag: bool) -> None:
        """Keep the socket non-blocking."""
        assert not flag, "an encrypted socket does not block"

    def shutdown(self, how: int) -> None:
        """End the transfer in both directions. Callable from any thread, at any time."""
        self.raw.shutdown(how)

    def close(self) -> None:
        """Release the socket. What it has accepted is still delivered."""
        self.raw.close()

    def _feed_record(self) -> bool:
        """Give one record to TLS, and no byte that follows it: after the handshake that may be no TLS any more. Return
        False where the other side has ended. Raises BlockingIOError as a socket does."""
        while missing := self._missing_of_record():
            received = self.raw.recv(missing)
            if not received:
                return False
            self._record += received
        self._stream.feed(bytes(self._record))
        self._record.clear()
        return True

    def _missing_of_record(self) -> int:
        """Return how many bytes are needed next: of the header, then of the rest. 0 for what is no record of TLS, too,
        which TLS refuses."""
        if (missing := _TLS_HEADER_BYTES - len(self._record)) > 0:
            return missing
        length = int.from_bytes(self._record[3:5], "big")
        is_record = 20 <= self._record[0] <= 24 and self._record[1] == 3 and length <= _TLS_LONGEST
        return _TLS_HEADER_BYTES + length - len(self._record) if is_record else 0

    def _feed(self) -> int:
        received = self.raw.recv_into(_scratch.buffer)
        self._stream.feed(_scratch.buffer[:received])
        return received

    def _send_handshake(self) -> None:
        """Send messages of the handshake: some kilobytes, into an empty send buffer."""
        if outgoing := self._stream.outgoing():
            self.raw.send(outgoing)


def _first_piece(buffers: Iterable[memoryview]) -> memoryview:
    """Return the first bytes of the buffers, at most PIECE: a copy of small buffers that follow each other, or a part
    of a large one. So the records of a tensor begin where the tensor does, and the receiver opens them in its
    blocks."""
    parts, count = list[memoryview](), 0
    for buffer in buffers:
        if parts and count + len(buffer) > _SMALL_BYTES:
            break
        if buffer:
            parts.append(buffer[:PIECE])
            count += len(parts[-1])
    return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


DataSocket: TypeAlias = socket.socket | EncryptedSocket


def encrypted(raw: socket.socket, certificates: Certificates | None, role: Role) -> DataSocket:
    """Return the socket itself, or with TLS on it where there are certificates."""
    return raw if certificates is None else EncryptedSocket(raw, certificates, role)


def is_ready(sock: DataSocket) -> bool:
    """Return whether application bytes can be sent and received: the handshake of TLS, if there is one, is complete.
    Raises OSError when it fails."""
    return not isinstance(sock, EncryptedSocket) or sock.handshake()


def has_input(sock: DataSocket) -> bool:
    """Return whether bytes may have been received that poll() does not show."""
    return isinstance(sock, EncryptedSocket) and sock.has_input


def arrived(sock: DataSocket) -> bytes | None:
    """Return some of the bytes that wait in the kernel; None while there are none, b"" when none will come. With TLS
    they are encrypted."""
    raw = sock.raw if isinstance(sock, EncryptedSocket) else sock
    try:
        return raw.recv(2 * SUBJECT_LIMIT, socket.MSG_PEEK)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def begins_tls(data: bytes) -> bool:
    """Return whether these may be the first bytes of a TLS connection."""
    return data[: len(TLS_RECORD)] == TLS_RECORD[: len(data)]
