"""The bytes of a data connection after its TLS handshake, in records of 256 kB that AES-256-GCM encrypts.

A record of TLS has 16 kB at most, and costs as much again as its encryption. So the two ends of a data connection use
TLS to prove who they are and to tell each other a random key, one for each direction, and seal what follows by
themselves:

    length of the plaintext (4 bytes, big-endian; authenticated) | ciphertext | tag (16 bytes)

The nonce is the number of the record in its direction, so that none can be repeated, left out or moved, and each key
is replaced by its hash after 64 GB. Both ends must have a release of the package `cryptography` that encrypts into a
given buffer; else everything stays in TLS.
"""

from __future__ import annotations

import hashlib
import secrets
import socket
from typing import Any

from farandole.base.wire.encryption import EncryptionFailed
from farandole.training.collectives.encrypted_socket import PIECE

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    CAN_SEAL = hasattr(AESGCM, "encrypt_into")
except ImportError:
    CAN_SEAL = False

_KEY_BYTES = 32
_HEADER_BYTES, _TAG_BYTES = 4, 16
_RECORD_BYTES = _HEADER_BYTES + PIECE + _TAG_BYTES
_RECORDS_PER_KEY = 1 << 18  # far below the limits of AES-GCM with a nonce that counts (RFC 8446, section 5.5)
_SMALL = 4 << 10  # for the messages before the token is proved
_LARGE = 2 * _RECORD_BYTES


def new_key() -> bytes:
    """Return a random key for the records that this end sends."""
    return secrets.token_bytes(_KEY_BYTES)


class SealedRecords:
    """One end of a connection whose two keys both ends know. For one thread at a time.

    Args:
        own_key: Of the records that this end sends.
        their_key: Of those that it receives.
    """

    def __init__(self, own_key: bytes, their_key: bytes) -> None:
        self._sending, self._receiving = _Direction(own_key), _Direction(their_key)
        self._sealed = memoryview(bytearray())
        self._received = memoryview(bytearray(_SMALL))
        self._start = self._end = 0  # of what was received and not opened yet
        self._rest = memoryview(b"")  # of an opened record

    @property
    def has_input(self) -> bool:
        """True when receive() returns bytes without the socket."""
        try:
            return bool(self._rest) or self._end - self._start >= self._wanted()
        except EncryptionFailed:
            return True  # receive() raises it

    def seal(self, piece: memoryview) -> memoryview:
        """Return the record of up to PIECE bytes. It is valid until the next call."""
        needed = _HEADER_BYTES + len(piece) + _TAG_BYTES
        if len(self._sealed) < needed:
            self._sealed = memoryview(bytearray(_RECORD_BYTES if needed > _SMALL else _SMALL))
        record = self._sealed[:needed]
        record[:_HEADER_BYTES] = len(piece).to_bytes(_HEADER_BYTES, "big")
        cipher, nonce = self._sending.next()
        cipher.encrypt_into(nonce, piece, record[:_HEADER_BYTES], record[_HEADER_BYTES:])
        return record

    def receive(self, sock: socket.socket, buffer: memoryview) -> int:
        """Fill the buffer as far as there are bytes, and return their number; 0: the other side has ended.

        Raises BlockingIOError as the socket does, and EncryptionFailed for a record that is not the next one of the
        other side.
        """
        count = self._take_rest(buffer)
        while count < len(buffer):
            wanted = self._wanted()
            if self._end - self._start >= wanted:
                count += self._open(wanted, buffer[count:])
            elif count:
                break
            else:
                # Hardly more than this record: what is received of the next one is moved to the front.
                most = max(wanted - (self._end - self._start) + _HEADER_BYTES, _SMALL)
                received = sock.recv_into(self._free(wanted)[:most])
                if not received:
                    break
                self._end += received
        return count

    def _wanted(self) -> int:
        """Return the number of bytes of the next record, or of its header while that is not there."""
        if self._end - self._start < _HEADER_BYTES:
            return _HEADER_BYTES
        length = int.from_bytes(self._received[self._start : self._start + _HEADER_BYTES], "big")
        if not 0 < length <= PIECE:
            raise EncryptionFailed("bytes were changed on their way")
        return _HEADER_BYTES + length + _TAG_BYTES

    def _free(self, wanted: int) -> memoryview:
        """Return the memory for further bytes of the next record, of `wanted` bytes, and beyond."""
        waiting = self._received[self._start : self._end]
        if len(self._received) < wanted:
            larger = memoryview(bytearray(_LARGE))
            larger[: len(waiting)] = waiting
            self._received = larger
        elif len(self._received) - self._start < wanted or not waiting:
            self._received[: len(waiting)] = waiting
        else:
            return self._received[self._end :]
        self._start, self._end = 0, len(waiting)
        return self._received[self._end :]

    def _open(self, wanted: int, buffer: memoryview) -> int:
        """Open the next record, of `wanted` bytes, into the buffer, and return the number of bytes there."""
        record = self._received[self._start : self._start + wanted]
        self._start += wanted
        length = wanted - _HEADER_BYTES - _TAG_BYTES
        opened = buffer[:length] if length <= len(buffer) else memoryview(bytearray(length))
        cipher, nonce = self._receiving.next()
        try:
            cipher.decrypt_into(nonce, record[_HEADER_BYTES:], record[:_HEADER_BYTES], opened)
        except InvalidTag:
            raise EncryptionFailed("bytes were changed on their way") from None
        if length <= len(buffer):
            return length
        self._rest = opened
        return self._take_rest(buffer)

    def _take_rest(self, buffer: memoryview) -> int:
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


class _Direction:
    """The key of one direction, and the number of its records."""

    def __init__(self, key: bytes) -> None:
        self._key, self._cipher, self._records = key, AESGCM(key), 0

    def next(self) -> tuple[Any, bytes]:
        """Return the cipher and the nonce of the next record."""
        if self._records and self._records % _RECORDS_PER_KEY == 0:
            self._key = hashlib.sha256(b"farandole: the next key" + self._key).digest()
            self._cipher = AESGCM(self._key)
        self._records += 1
        return self._cipher, self._records.to_bytes(12, "big")
