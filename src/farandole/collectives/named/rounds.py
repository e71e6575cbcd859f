"""Run one round: every rank's payload goes to every rank. engine.py starts one when a rank has new requests.

Payloads travel in a trailer of fixed length, which takes one trip around the ring and no agreement on lengths before. A
second exchange follows only when some rank's payload does not fit.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from farandole.collectives.named.operation_requests import RoundPayload
from farandole.collectives.transport import Transport

TRAILER_BYTES = 64

_TOO_LONG = 0xFF
_NOTHING_NEW = RoundPayload()

_encode: Callable[[RoundPayload], bytes] = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes], RoundPayload] = msgspec.msgpack.Decoder(RoundPayload).decode


class Rounds:
    """Exchanges payloads over one transport. For one thread."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._nothing = torch.empty(0)

    def exchange(self, payload: RoundPayload) -> list[RoundPayload]:
        """Return the payload of every rank, by rank. Raises the errors of the transport."""
        encoded = b"" if payload == _NOTHING_NEW else _encode(payload)
        trailers = self._transport.all_reduce(self._nothing, _trailer(encoded))
        if all(trailer[0] != _TOO_LONG for trailer in trailers):
            return [_received(trailer[1 : 1 + trailer[0]]) for trailer in trailers]
        return [_received(each) for each in self._transport.all_gather(encoded)]


def _trailer(encoded: bytes) -> bytes:
    if len(encoded) >= TRAILER_BYTES:
        return bytes([_TOO_LONG]).ljust(TRAILER_BYTES, b"\0")
    return (bytes([len(encoded)]) + encoded).ljust(TRAILER_BYTES, b"\0")


def _received(encoded: bytes) -> RoundPayload:
    return _decode(encoded) if encoded else _NOTHING_NEW
