"""One worker's side of a job without other processes: a coordinator, and other ranks, that say what a test wants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from farandole.base.membership import DataAddress, GenerationId, Peer, Placement, Progress
from farandole.base.wire.link_messages import Prepare, Remark, Start
from farandole.errors import GenerationEnded, JobEnded
from farandole.training.collectives import world
from farandole.training.collectives.alone import AloneTransport
from farandole.training.state.session import HostUpdateResult
from farandole.training.state.sync import Standing
from farandole.training.worker.worker_recovery import CallRound


def as_a_newcomer(payload: bytes) -> bytes:
    """What another worker says: the same as this one, but that it holds no state."""
    try:
        standing = msgspec.msgpack.decode(payload, type=Standing)
    except msgspec.MsgspecError:
        return _with_value(payload, as_a_newcomer)
    return msgspec.msgpack.encode(
        msgspec.structs.replace(standing, is_holder=False, progress=Progress(1, 0, 0, 0, 0), content=0, sample=0)
    )


def _with_value(payload: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """The payload with what a round at a boundary carries changed; anything else as it is."""
    try:
        body_round = msgspec.msgpack.decode(payload, type=CallRound)
    except msgspec.MsgspecError:
        return payload
    return msgspec.msgpack.encode(msgspec.structs.replace(body_round, value=change(body_round.value)))


class OneLeft(AloneTransport):
    """The transport of the only real worker, which is rank `place` of `of`. What the others say is what `others` makes
    of what this rank says."""

    def __init__(self, number: int, place: int = 0, of: int = 1) -> None:
        super().__init__(number)
        self.place, self.of = place, of
        self.others: Callable[[bytes], bytes] = as_a_newcomer

    @property
    def rank(self) -> int:
        return self.place

    @property
    def size(self) -> int:
        return self.of

    def _by_rank(self, payload: bytes) -> list[bytes]:
        return [payload if rank == self.place else self.others(payload) for rank in range(self.of)]

    def all_reduce(self, tensor: torch.Tensor, trailer: bytes = b"", op: Any = None) -> list[bytes]:
        self._raise_if_ended("all_reduce")
        return self._by_rank(trailer)

    def all_gather(self, payload: bytes) -> list[bytes]:
        self._raise_if_ended("all_gather")
        return self._by_rank(payload)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        assert source == self.place, f"rank {source} has nothing to give"


class Link:
    """The connection to the coordinator, which records what is sent. `members` is the size of the generation."""

    def __init__(self, members: int = 1) -> None:
        self.ordered = self.prepared = 0
        self.members = members
        self.aborted_s = 0.0
        self.sent: list[Any] = []
        self.unread: list[Callable[[], None]] = []  # what orders will do when the link's thread has its turn
        self.on_prepare: Callable[[Prepare], None] | None = None
        self.has_ended = False  # the job
        self.lost_at_the_end = 0  # how many of its ends another worker does not reach
        self.was_asked_to_leave = False

    def send(self, message: object) -> None:
        self.sent.append(message)

    def catch_up(self) -> None:
        while self.unread:
            self.unread.pop(0)()

    @property
    def is_over(self) -> bool:
        return self.has_ended

    def raise_if_over(self) -> None:
        if self.has_ended:
            raise JobEnded("the test has ended it")

    def ask_to_leave(self) -> None:
        self.was_asked_to_leave = True

    def wait_for_release(self, number: int) -> bool:
        if self.lost_at_the_end == 0:
            return True
        self.lost_at_the_end -= 1
        self.ordered = number + 1
        return False

    def wait_for_abort(self, above: int) -> int:
        assert self.ordered > above, "nobody would wake this worker"
        return self.ordered


class Orders:
    """A coordinator's side of one worker, in the place of worker.job.Job: faults, and the generations behind them."""

    def __init__(self, place: int = 0, of: int = 1) -> None:
        self.link = Link(of)
        self.joins = False  # a process that no generation has admitted yet
        self.ready_s = 0.0
        self.place, self.of = place, of
        self.starts_anew = False  # the generations of START are those of a job without any state
        self.overtaken: set[int] = set()  # generations that end while their data connections are made
        self.agreed = 0
        self.asked: list[str] = []  # the reasons for which this worker has asked for a regroup
        self.has_finished = False
        self.enter(1)

    def enter(self, number: int) -> OneLeft:
        transport = OneLeft(number, self.place, self.of)
        placement = Placement(self.place, self.of, self.place, self.of, 0, 1)
        here = world.World(GenerationId(1, 1, number, "test"), placement, transport, on_remark=self.remarked)
        world.enter(here)
        return transport

    def remarked(self, topic: str, text: str) -> None:
        self.link.send(Remark(topic, text))

    @property
    def transport(self) -> OneLeft:
        transport = world.current().transport
        assert isinstance(transport, OneLeft)
        return transport

    def lose_a_worker(self) -> None:
        """ABORT: what runs in the current generation ends."""
        self.link.ordered = world.current().id.number + 1
        self.transport.abort("w9 is lost")

    def prepare(self, update: HostUpdateResult) -> None:
        """PREPARE: a planned change to the next generation, at a boundary that all ranks agree on."""
        self.link.prepared = world.current().id.number + 1
        if self.link.on_prepare is not None:
            self.link.on_prepare(Prepare(self.link.prepared, "planned by the test", int(update)))

    # What the run loop asks

    def is_newcomer(self) -> bool:
        return self.joins

    def has_to_regroup(self) -> bool:
        return self.link.ordered > world.current().id.number or bool(self.agreed)

    def agree(self, prepared_by_rank: list[int]) -> None:
        alike = set(prepared_by_rank) == {prepared_by_rank[0]}
        self.agreed = prepared_by_rank[0] if alike else 0

    def ask_for_regroup(self, reason: str) -> None:
        self.asked.append(reason)
        self.link.ordered = world.current().id.number + 1

    def quiesce(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def wait_for_start(self) -> Start:
        number = max(self.link.ordered, self.agreed)
        assert number > world.current().id.number, "no order has come"
        placement = Placement(self.place, self.of, self.place, self.of, 0, 1)
        alone = Peer("w0", self.place, DataAddress("", 0))
        return Start(GenerationId(1, 1, number, "test"), placement, alone, alone, bootstrap=self.starts_anew)

    def build(self, start: Start) -> OneLeft:
        number = start.id.number
        if number in self.overtaken:
            self.link.ordered = number + 1
            raise GenerationEnded("connect", number, "w8 is lost, too")
        self.agreed = self.link.prepared = 0
        self.joins = False
        return self.enter(number)
