"""Calls of fd.mean and fd.any in a loop body, which survive the loss of a worker.

Such a call must not leave the loop body: after a decided step the rest of the body (a scheduler's step, an average of
weights) could not be repeated. So this worker connects to the members of the next generation inside the body, and the
call is completed in *rounds* among the workers that are in the same call. A worker that has reached its next boundary
takes part in the rounds, too, until all have; only then are the states compared. A worker that had completed the call
before the loss sends its result to the others.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable

import msgspec
import torch

from farandole.collectives import agreement
from farandole.collectives.transport import Transport
from farandole.errors import RecoverableError


class CallKey(msgspec.Struct, frozen=True):
    """The key of one call, the same on all workers that make it: its kind, and its number since a boundary."""

    boundary_number: int
    kind: bytes
    count: int


class CallRound(msgspec.Struct, frozen=True):
    """The message of one worker in a round.

    waits_in  the call that it is in; None: it has reached its next boundary
    value     its contribution: the bytes of its tensor
    last      the call that it has completed last, and its result
    """

    waits_in: CallKey | None
    value: bytes
    last: CallKey | None
    result: bytes


class BodyCalls:
    """The calls of one worker.

    boundary_number  gives the number of the boundary that was passed last
    is_in_body       whether a batch is out, so that a call can be completed where it is
    is_connected     whether this worker is connected to a new generation whose states are not compared yet
    connect          connects to the members of the next generation
    transport        gives the transport of the current generation
    add_up           adds up over all workers of a generation, where no worker was lost
    """

    def __init__(
        self,
        boundary_number: Callable[[], int],
        is_in_body: Callable[[], bool],
        is_connected: Callable[[], bool],
        connect: Callable[[], None],
        transport: Callable[[], Transport],
        add_up: Callable[[str, torch.Tensor], torch.Tensor] = agreement.add_up,
    ) -> None:
        self._boundary_number, self._is_in_body, self._is_connected = boundary_number, is_in_body, is_connected
        self._connect, self._transport, self._add_up = connect, transport, add_up
        self._counts: Counter[bytes] = Counter()
        self._counted_at = -1
        self._last: CallKey | None = None
        self._result = b""

    def call(self, what: str, mine: torch.Tensor) -> torch.Tensor:
        """Return the sum of `mine` over all workers; over the remaining ones when a worker is lost in a loop body."""
        key = self._key(what)
        total = self._first_try(what, mine)
        while total is None:
            try:
                total = self._complete(self._transport(), key, mine)
            except RecoverableError:
                self._connect()
        self._last, self._result = key, _to_bytes(total)
        return total

    def wait_for_bodies(self, transport: Transport) -> None:
        """Take part in the rounds, at a boundary, until every worker has reached its own."""
        mine = msgspec.msgpack.encode(CallRound(None, b"", self._last, self._result))
        while any(each.waits_in is not None for each in _all_gather(transport, mine)):
            pass

    def _first_try(self, what: str, mine: torch.Tensor) -> torch.Tensor | None:
        """Return the sum over all workers; None where the call has to be completed in rounds."""
        if self._is_connected():
            return None
        try:
            return self._add_up(what, mine)
        except RecoverableError:
            if not self._is_in_body():
                raise
        self._connect()
        return None

    def _complete(self, transport: Transport, key: CallKey, mine: torch.Tensor) -> torch.Tensor | None:
        """Return the result of one round; None: other workers needed a result first, another round follows."""
        rounds = _all_gather(
            transport, msgspec.msgpack.encode(CallRound(key, _to_bytes(mine), self._last, self._result))
        )
        results = {each.last: each.result for each in rounds if each.last is not None}
        if key in results:
            return _like(mine, results[key])
        if any(each.waits_in in results for each in rounds):
            return None
        parts = [_like(mine, each.value) for each in rounds if each.waits_in == key]
        return torch.stack(parts).sum(0).to(mine.dtype)

    def _key(self, what: str) -> CallKey:
        number, kind = self._boundary_number(), hashlib.blake2b(what.encode(), digest_size=8).digest()
        if number != self._counted_at:
            self._counts.clear()
            self._counted_at = number
        self._counts[kind] += 1
        return CallKey(number, kind, self._counts[kind])


def _all_gather(transport: Transport, mine: bytes) -> list[CallRound]:
    return [msgspec.msgpack.decode(each, type=CallRound) for each in transport.all_gather(mine)]


def _to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _like(tensor: torch.Tensor, raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=tensor.dtype).reshape(tensor.shape)
