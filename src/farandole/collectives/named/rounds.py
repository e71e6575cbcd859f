"""One round of talk: every rank's words to every rank. engine.py calls it whenever somebody has something to say.

Words travel in a trailer of fixed length, which takes one trip around the ring and no agreement on lengths before.
Only when some rank's words do not fit is there a second exchange.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from farandole.collectives.named.requests import Said
from farandole.collectives.transport import Transport

TRAILER_BYTES = 64

_TOO_LONG = 0xFF
_SILENCE = Said()

_encode: Callable[[Said], bytes] = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes], Said] = msgspec.msgpack.Decoder(Said).decode


class Rounds:
    """Exchanges words over one transport. For one thread."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._nothing = torch.empty(0)

    def exchange(self, said: Said) -> list[Said]:
        """What every rank says in this round, by rank. Raises what the transport raises."""
        words = b"" if said == _SILENCE else _encode(said)
        trailers = self._transport.all_reduce(self._nothing, _trailer(words))
        if all(trailer[0] != _TOO_LONG for trailer in trailers):
            return [_heard(trailer[1 : 1 + trailer[0]]) for trailer in trailers]
        return [_heard(each) for each in self._transport.all_gather(words)]


def _trailer(words: bytes) -> bytes:
    if len(words) >= TRAILER_BYTES:
        return bytes([_TOO_LONG]).ljust(TRAILER_BYTES, b"\0")
    return (bytes([len(words)]) + words).ljust(TRAILER_BYTES, b"\0")


def _heard(words: bytes) -> Said:
    return _decode(words) if words else _SILENCE
