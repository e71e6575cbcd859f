"""The control block of one rank: its progress, and two message slots. memory_barrier.py waits on control blocks.

A rank writes its own control block and reads the others'. The counter counts *arrivals*: an operation has one or more,
the same number on all ranks, and data that a rank stored before it arrived is visible to a rank that sees it arrive.
The two message slots alternate. A rank never writes into a message slot that may still be read: all ranks have read the
previous message in it before they arrived again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from farandole.collectives.shared_memory import futex
from farandole.collectives.shared_memory.tensors import readable

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
        futex.wake(self._address)

    def has_arrived(self, times: int) -> bool:
        """Return whether this rank has arrived `times` times, counted from 0 and modulo 2**32."""
        return (self._arrivals[0] - times) & _MASK < _HALF

    def wait(self, times: int, timeout_s: float) -> None:
        """Sleep until this rank arrives again, unless it has arrived `times` times; not longer than `timeout_s`."""
        seen = self._arrivals[0]
        if (seen - times) & _MASK >= _HALF:
            futex.wait(self._address, seen, timeout_s)

    def wake(self) -> None:
        """Wake all ranks that wait for this one, for a check."""
        futex.wake(self._address)
