"""One rank's control block: how far it has come, and two message slots for its messages. memory_barrier.py waits on
control blocks.

A rank writes its own control block and reads the others'. The counter counts *arrivals*: an operation has one or more,
the same number on all ranks, and what a rank stored before it arrived is there for whoever sees it arrive. Message
slots take turns. Nobody writes into a message slot that may still be read: the one before was read by all before they
arrived anew.
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
    """`payload` is bytes, `data` is a flat tensor of uint8."""

    payload: memoryview
    data: torch.Tensor


class ControlBlock:
    """`memory` is a whole control block, one's own or another rank's, which is read-only."""

    def __init__(self, memory: memoryview) -> None:
        tensor = readable(memory)
        self._arrivals = memory[:_COUNTER_BYTES].cast("I")
        self._address = tensor.data_ptr()
        self._message_slots = [
            MessageSlot(memory[begin:][:PAYLOAD_BYTES], tensor[begin + PAYLOAD_BYTES :][:DATA_BYTES])
            for begin in (_COUNTER_BYTES, _COUNTER_BYTES + _SLOT_BYTES)
        ]

    def message_slot(self, turn: int) -> MessageSlot:
        """The message slot of turn number `turn`, 0 and 1 by turns."""
        return self._message_slots[turn % 2]

    def arrive(self) -> None:
        """One arrival more; wakes whoever waits for it."""
        self._arrivals[0] = (self._arrivals[0] + 1) & _MASK
        futex.wake(self._address)

    def has_arrived(self, times: int) -> bool:
        """Whether this rank has arrived `times` times, counted from 0 and modulo 2**32."""
        return (self._arrivals[0] - times) & _MASK < _HALF

    def wait(self, times: int, timeout_s: float) -> None:
        """Sleep until this rank arrives anew, unless it has arrived `times` times; not longer than `timeout_s`."""
        seen = self._arrivals[0]
        if (seen - times) & _MASK >= _HALF:
            futex.wait(self._address, seen, timeout_s)

    def wake(self) -> None:
        """Have everybody who waits for this rank look around."""
        futex.wake(self._address)
