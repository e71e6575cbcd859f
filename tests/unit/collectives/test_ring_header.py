from __future__ import annotations

import torch

from farandole.training.collectives.connection_pair import dtype_code
from farandole.training.collectives.ring_header import (
    HEADER_BYTES,
    Header,
    TransportOperation,
    describe_packed,
    sequence_of,
)
from farandole.training.collectives.transport import Reduction


def test_a_header_describes_itself_before_and_after_its_way() -> None:
    header = Header(TransportOperation.ALL_REDUCE, 7, dtype_code(torch.float32), Reduction.SUM, 4000, 64)
    text = "all_reduce of 4000 bytes of float32 with a trailer of 64 bytes (operation 7)"
    assert header.describe() == text
    assert describe_packed(header.pack()) == text


def test_a_reduction_that_is_no_sum_is_named() -> None:
    header = Header(TransportOperation.ALL_REDUCE, 1, dtype_code(torch.int64), Reduction.MAX, 8)
    assert header.describe() == "all_reduce of 8 bytes of int64 by max (operation 1)"


def test_a_broadcast_names_its_source() -> None:
    header = Header(TransportOperation.BROADCAST, 1, dtype_code(torch.int64), 3, 8)
    assert header.describe() == "broadcast of 8 bytes of int64 from rank 3 (operation 1)"


def test_bytes_that_are_no_header_are_called_so() -> None:
    packed = Header(TransportOperation.BARRIER, 1).pack()
    for wrong in (bytes(HEADER_BYTES), packed[:4] + b"\xff" + packed[5:], packed[:5] + b"\xff" + packed[6:]):
        assert "an operation that this version does not know" in describe_packed(wrong)


def test_a_packed_header_tells_its_sequence_number() -> None:
    packed = Header(TransportOperation.BARRIER, 7).pack()
    assert sequence_of(packed) == 7
    assert sequence_of(packed[:-1]) is None
    assert sequence_of(bytes(len(packed))) is None
