"""Transports for the collectives that a script calls itself, by way of torch.distributed: one completes them when a
worker is lost, the other one answers them locally. training.py chooses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import torch

from farandole.base.membership import Placement
from farandole.training.collectives import world
from farandole.training.collectives.connection_pair import byte_view, bytes_of
from farandole.training.collectives.transport import Reduction
from farandole.training.worker.worker_recovery import BodyCalls


class _Contribution(msgspec.Struct, frozen=True, array_like=True):
    """The contribution of one worker to a collective, or its result.

    tensor     the bytes of the tensor
    payloads   of each worker that has contributed, by rank
    is_source  this worker is the source of a broadcast
    """

    tensor: bytes = b""
    payloads: tuple[bytes, ...] = ()
    is_source: bool = False


class SurvivingTransport:
    """The transport of one collective of the script, in a world of the size that the script sees.

    When a worker is lost, the remaining ones complete it: a sum lacks the contribution of the lost worker, a list has
    that of the lowest remaining rank in its place, and a broadcast from the lost worker gives the values of the lowest
    remaining rank to all.
    """

    def __init__(
        self,
        calls: BodyCalls,
        placement: Placement,
        note_lack: Callable[[], None],
        look: Callable[[torch.Tensor], None],
    ) -> None:
        self._calls, self.rank, self.size = calls, placement.rank, placement.size
        self._note_lack = note_lack  # called when a contribution is missing
        self._look = look  # called with what is to be reduced

    def all_reduce(self, tensor: torch.Tensor, trailer: bytes = b"", op: Reduction = Reduction.SUM) -> list[bytes]:
        self._look(tensor)
        before = tensor.detach().clone()
        trailers: list[bytes] | None = None

        def first_try() -> bytes:
            nonlocal trailers
            trailers = world.current().transport.all_reduce(tensor, trailer, op)
            return _pack(_Contribution(_raw(tensor), tuple(trailers)))

        def combine(parts: list[bytes]) -> bytes:
            several = [_unpack(each) for each in parts]
            self._note_lack()
            values = torch.stack([_like(before, each.tensor) for each in several])
            payloads = tuple(payload for each in several for payload in each.payloads)
            return _pack(_Contribution(_raw(_REDUCED[op](values).to(before.dtype)), payloads))

        result = self._calls.complete(
            f"all_reduce {op.name}", first_try, lambda: _pack(_Contribution(_raw(before), (trailer,))), combine
        )
        if trailers is not None:
            return trailers
        done = _unpack(result)
        tensor.copy_(_like(before, done.tensor))
        return _of_length(done.payloads, self.size)

    def all_gather(self, payload: bytes) -> list[bytes]:
        def first_try() -> bytes:
            return _pack(_Contribution(payloads=tuple(world.current().transport.all_gather(payload))))

        def combine(parts: list[bytes]) -> bytes:
            self._note_lack()
            return _pack(_Contribution(payloads=tuple(one for each in parts for one in _unpack(each).payloads)))

        result = self._calls.complete(
            "all_gather", first_try, lambda: _pack(_Contribution(payloads=(payload,))), combine
        )
        return _of_length(_unpack(result).payloads, self.size)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        before, is_done = tensor.detach().clone(), False

        def first_try() -> bytes:
            nonlocal is_done
            transport = world.current().transport
            transport.broadcast(tensor, source)
            transport.barrier()  # otherwise the source could be several calls ahead of the others
            is_done = True
            return _pack(_Contribution(_raw(tensor)))

        def combine(parts: list[bytes]) -> bytes:
            several = [_unpack(each) for each in parts]
            chosen = next((each for each in several if each.is_source), several[0])
            if not chosen.is_source:
                self._note_lack()
            return _pack(_Contribution(chosen.tensor))

        mine = _Contribution(_raw(before), is_source=self.rank == source)
        result = self._calls.complete("broadcast", first_try, lambda: _pack(mine), combine)
        if not is_done:
            tensor.copy_(_like(before, _unpack(result).tensor))

    def barrier(self) -> None:
        def first_try() -> bytes:
            world.current().transport.barrier()
            return b""

        self._calls.complete("barrier", first_try, lambda: b"", lambda _: b"")

    def wait_for_peer(self, wake: int) -> bool | None:
        return world.current().transport.wait_for_peer(wake)

    def abort(self, reason: str) -> None:
        """Do nothing: the transports of generations are aborted."""

    def close(self) -> None:
        """Do nothing: the transports of generations are closed."""


class EchoTransport:
    """The transport of a worker that passes over code: each collective ends at once, as if each of `size` workers had
    contributed what this worker contributes."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, tensor: torch.Tensor, trailer: bytes = b"", op: Reduction = Reduction.SUM) -> list[bytes]:
        if op is Reduction.SUM:
            tensor.mul_(self.size)
        elif op is Reduction.PRODUCT:
            tensor.pow_(self.size)
        return [bytes(trailer)] * self.size

    def all_gather(self, payload: bytes) -> list[bytes]:
        return [bytes(payload)] * self.size

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Keep this worker's values."""

    def barrier(self) -> None:
        """Return at once."""

    def wait_for_peer(self, wake: int) -> bool | None:
        return False

    def abort(self, reason: str) -> None:
        """Do nothing: no operation waits."""

    def close(self) -> None:
        """Do nothing: nothing is open."""


def echo_world(here: world.World, rank: int, size: int) -> world.World:
    """Return a world of another size, whose collectives are answered locally."""
    placement = msgspec.structs.replace(here.placement, rank=rank, size=size)
    return replace(here, placement=placement, transport=EchoTransport(rank, size))


_REDUCED: dict[Reduction, Callable[[torch.Tensor], torch.Tensor]] = {
    Reduction.SUM: lambda values: values.sum(0),
    Reduction.MIN: lambda values: values.amin(0),
    Reduction.MAX: lambda values: values.amax(0),
    Reduction.PRODUCT: lambda values: values.prod(0),
}


def _pack(contribution: _Contribution) -> bytes:
    return msgspec.msgpack.encode(contribution)


def _unpack(raw: bytes) -> _Contribution:
    return msgspec.msgpack.decode(raw, type=_Contribution)


def _raw(tensor: torch.Tensor) -> bytes:
    return bytes(byte_view(bytes_of(tensor.detach().cpu()))) if tensor.numel() else b""


def _like(tensor: torch.Tensor, raw: bytes) -> torch.Tensor:
    if not raw:
        return torch.empty_like(tensor, device="cpu")
    return torch.frombuffer(bytearray(raw), dtype=tensor.dtype).reshape(tensor.shape)


def _of_length(payloads: tuple[bytes, ...], length: int) -> list[bytes]:
    """Return a list of the length that the script expects. Lost workers are represented by the lowest rank."""
    return [*payloads, *[payloads[0]] * length][:length]
