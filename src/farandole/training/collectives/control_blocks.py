"""The control block of each rank of a host, in shared memory: its progress, and two message slots; and the barrier that
is made of the progress of all.

A rank writes its own control block and reads the others'. The counter counts *arrivals*: an operation has one or more,
the same number on all ranks, and data that a rank stored before it arrived is visible to a rank that sees it arrive.
The two message slots alternate. A rank never writes into a message slot that may still be read: all ranks have read the
previous message in it before they arrived again.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import msgspec
import torch

from farandole.base.liveness.status_reporting import WaitingForPeers
from farandole.base.machine import may_spin
from farandole.training.collectives.shared_memory_tensors import (
    SegmentRef,
    can_share_memory,
    create_segment,
    open_segment,
    readable,
)
from farandole.training.collectives.transport import Transport

PAYLOAD_BYTES, DATA_BYTES = 4096, 60 * 1024
"""Sizes of the two parts of a message slot: for a payload, and for a small tensor."""

_SLOT_BYTES = PAYLOAD_BYTES + DATA_BYTES
_COUNTER_BYTES = 64  # a cache line of its own
CONTROL_BLOCK_BYTES = _COUNTER_BYTES + 2 * _SLOT_BYTES
_HALF = 2**31
_MASK = 2**32 - 1


class MessageSlot(NamedTuple):
    """A message: `payload` is bytes, `data` is a flat tensor of uint8."""

    payload: memoryview
    data: torch.Tensor


class ControlBlock:
    """A whole control block in `memory`: this rank's own, or another rank's, which is read-only."""

    def __init__(self, memory: memoryview) -> None:
        tensor = readable(memory)
        self._arrivals = memory[:_COUNTER_BYTES].cast("I")
        self._address = tensor.data_ptr()
        self._message_slots = [
            MessageSlot(memory[begin:][:PAYLOAD_BYTES], tensor[begin + PAYLOAD_BYTES :][:DATA_BYTES])
            for begin in (_COUNTER_BYTES, _COUNTER_BYTES + _SLOT_BYTES)
        ]

    def message_slot(self, turn: int) -> MessageSlot:
        """Return the message slot of turn number `turn`; 0 and 1 alternate."""
        return self._message_slots[turn % 2]

    def arrive(self) -> None:
        """Count one more arrival, and wake the ranks that wait for it."""
        self._arrivals[0] = (self._arrivals[0] + 1) & _MASK
        futex_wake(self._address)

    def has_arrived(self, times: int) -> bool:
        """Return whether this rank has arrived `times` times, counted from 0 and modulo 2**32."""
        return (self._arrivals[0] - times) & _MASK < _HALF

    def wait(self, times: int, timeout_s: float) -> None:
        """Sleep until this rank arrives again, unless it has arrived `times` times; not longer than `timeout_s`."""
        seen = self._arrivals[0]
        if (seen - times) & _MASK >= _HALF:
            futex_wait(self._address, seen, timeout_s)

    def wake(self) -> None:
        """Wake all ranks that wait for this one, for a check."""
        futex_wake(self._address)


# A barrier: a waiting rank spins for a moment, then sleeps ------------------------------------------------------------

TroubleT = TypeVar("TroubleT")

# One check takes about 0.1 us. A sleep and a wake-up take 10 to 50 us, of a core that others could use.
_SPINS = 300
_SLEEP_S = 0.002  # between two checks; an abort wakes at once, except in the moment before falling asleep


class MemoryBarrier(Generic[TroubleT]):
    """A barrier on the `control_blocks` of all ranks, by rank. For one thread; wake() is for any.

    `look_around` is called every few milliseconds while this rank sleeps; it returns a reason to stop waiting, or None.
    """

    def __init__(
        self, rank: int, control_blocks: Sequence[ControlBlock], look_around: Callable[[], TroubleT | None]
    ) -> None:
        self._mine = control_blocks[rank]
        self._others = [control_block for other, control_block in enumerate(control_blocks) if other != rank]
        self._look_around = look_around
        self._spins = _SPINS if may_spin(len(control_blocks)) else 0
        self._times = 0

    def arrive(self) -> None:
        """Announce that all data that this rank has stored so far is visible."""
        self._times += 1
        self._mine.arrive()

    def wait(self) -> TroubleT | None:
        """Wait until all ranks have arrived as often as this one. Return None, or the reason to stop waiting.

        An arrival stays valid: a complete operation counts, even if a rank was lost since.
        """
        for control_block in self._others:
            for _ in range(self._spins):
                if control_block.has_arrived(self._times):
                    break
            if not control_block.has_arrived(self._times):
                with WaitingForPeers():
                    trouble = self._sleep_until_arrival(control_block)
                if trouble is not None:
                    return trouble
        return None

    def _sleep_until_arrival(self, control_block: ControlBlock) -> TroubleT | None:
        while not control_block.has_arrived(self._times):
            trouble = self._look_around()
            # Checked again: its arrival may have been its last action before it left.
            if trouble is not None and not control_block.has_arrived(self._times):
                return trouble
            control_block.wait(self._times, _SLEEP_S)
        return None

    def wake(self) -> None:
        """Make this rank check now. Callable from any thread. The others check too, and sleep on."""
        for control_block in self._others:
            control_block.wake()


# Linux's futex(2), through the C library ------------------------------------------------------------------------------

_SYSCALL = 202  # on x86-64
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def futex_wait(address: int, value: int, timeout_s: float) -> None:
    """Sleep while the 32-bit word at `address` is `value`, until futex_wake() or for `timeout_s`. May return early.

    Releases the interpreter's lock. Raises OSError for an address that is not mapped.
    """
    whole = int(timeout_s)
    limit = _TimeSpec(whole, int((timeout_s - whole) * 1e9))
    if _syscall()(_SYSCALL, address, _WAIT, value, ctypes.byref(limit), None, 0) == -1:
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise OSError(number, os.strerror(number))


def futex_wake(address: int) -> None:
    """Wake all threads, in all processes, that sleep on the word at `address`."""
    _syscall()(_SYSCALL, address, _WAKE, _EVERYBODY, None, None, 0)


@functools.cache
def _syscall() -> Callable[..., int]:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    call.argtypes = [
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint,
    ]
    return call


# Construction from a ring ---------------------------------------------------------------------------------------------
#
# It is possible if the ranks can map each other's memory.

ControlBlocks: TypeAlias = list[ControlBlock]
"""The control block of each rank that shares memory, by rank."""


class ControlBlockRefs(msgspec.Struct, frozen=True, array_like=True):
    """The answer of one rank to the others: where its control blocks are, one for each transport; or a problem."""

    refs: tuple[SegmentRef, ...] = ()
    problem: str = ""


class OwnControlBlocks:
    """A rank's control blocks for `count` transports, which are not read by the others yet.

    `rank` is its name in messages about problems.
    """

    def __init__(self, rank: int, count: int) -> None:
        self._rank = rank
        self._control_blocks: list[ControlBlock] = []
        self._hide: list[Callable[[], object]] = []
        refs: list[SegmentRef] = []
        problem = "" if can_share_memory() else f"rank {rank} is not on Linux for x86-64"
        try:
            for _ in range(0 if problem else count):
                segment = create_segment(CONTROL_BLOCK_BYTES)
                self._control_blocks.append(ControlBlock(segment.memory))
                self._hide.append(segment.hide)
                refs.append(segment.ref)
        except OSError as error:
            problem = f"rank {rank} has no shared memory: {error}"
        self.refs = ControlBlockRefs((), problem) if problem else ControlBlockRefs(tuple(refs))
        """The answer to the others."""

    def open_those_of(
        self, ring: Transport, mates: Sequence[int], received: Sequence[ControlBlockRefs]
    ) -> list[ControlBlocks] | str:
        """Open, for each transport, the control blocks of `mates`, the ranks of this rank's host, itself included.

        Returns, on all ranks of the ring, or of a group of messages, alike, the reason where that is impossible. All
        of them call it at once; `received` are their answers. Raises PeerLost and GenerationEnded.
        """
        problem, opened = self.refs.problem, list[ControlBlocks]()
        if all(received[rank].refs for rank in mates):
            try:
                opened = [
                    [
                        control_block if rank == ring.rank else ControlBlock(open_segment(received[rank].refs[number]))
                        for rank in mates
                    ]
                    for number, control_block in enumerate(self._control_blocks)
                ]
            except OSError as error:
                problem = f"rank {self._rank} cannot read the memory of another rank: {error}"
        problems = [each.decode() for each in ring.all_gather(problem.encode()) if each]
        for hide in self._hide:
            hide()  # all ranks have opened the control blocks, or none uses them
        return problems[0] if problems else opened


def share_control_blocks(ring: Transport, mates: Sequence[int], name: int | None = None) -> ControlBlocks | str:
    """Return the control blocks of `mates` for one transport of all ranks, as OwnControlBlocks.open_those_of().

    `name` is this rank's in messages about problems, if that is not its rank.
    """
    own = OwnControlBlocks(ring.rank if name is None else name, 1)
    received = ring.all_gather(msgspec.msgpack.encode(own.refs))
    opened = own.open_those_of(ring, mates, [msgspec.msgpack.decode(each, type=ControlBlockRefs) for each in received])
    return opened if isinstance(opened, str) else opened[0]
