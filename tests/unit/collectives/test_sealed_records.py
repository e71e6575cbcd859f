"""The records of data connections with TLS: the bytes arrive whole and in order, or it is an error."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from farandole.base.wire.authentication import Role
from farandole.base.wire.encryption import EncryptionFailed
from farandole.training.collectives import sealed_records
from farandole.training.collectives.encrypted_socket import PIECE, EncryptedSocket
from farandole.training.collectives.sealed_records import SealedRecords, new_key
from tests.support.certificates import of_this_process

pytestmark = pytest.mark.core


class Pair:
    """Two ends that know each other's keys, and the wire from the first to the second."""

    def __init__(self) -> None:
        keys = new_key(), new_key()
        self.one, self.other = SealedRecords(*keys), SealedRecords(*reversed(keys))
        self.sender, self.receiver = socket.socketpair()
        self.sender.setblocking(False)
        self.receiver.setblocking(False)

    def read(self, count: int) -> bytes:
        buffer = memoryview(bytearray(count))
        return bytes(buffer[: self.other.receive(self.receiver, buffer)])

    def pass_on(self, wire: bytearray) -> None:
        """Send more than the socket holds, and read meanwhile."""
        while wire:
            with suppress(BlockingIOError):
                del wire[: self.sender.send(wire)]
            with suppress(BlockingIOError):
                self.read(PIECE)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.sender.close()
    made.receiver.close()


@pytest.mark.parametrize("seed", range(20))
def test_bytes_arrive_in_order_however_they_are_cut(pair: Pair, seed: int) -> None:
    chance = random.Random(seed)
    sent, received, wire = bytearray(), bytearray(), bytearray()
    for _ in range(60):
        piece = chance.randbytes(chance.choice([1, 5, 300, 5000, PIECE]))
        sent += piece
        wire += pair.one.seal(memoryview(piece))
        while wire and chance.random() < 0.7:
            with suppress(BlockingIOError):  # the wire is full
                del wire[: pair.sender.send(wire[: chance.choice([1, 3, 100, 4096, 100_000])])]
            with suppress(BlockingIOError):  # a part of a record
                received += pair.read(chance.choice([1, 7, 1000, 2 * PIECE]))
    while len(received) < len(sent):
        with suppress(BlockingIOError):
            del wire[: pair.sender.send(wire[:50_000])]
        with suppress(BlockingIOError):
            received += pair.read(3 * PIECE)
    assert received == sent
    assert not pair.other.has_input


def test_whatever_is_changed_on_its_way_is_an_error(pair: Pair) -> None:
    record = bytes(pair.one.seal(memoryview(b"gradients")))
    for place in range(len(record)):
        changed = bytearray(record)
        changed[place] ^= 1 << place % 8
        made = Pair()
        made.other = SealedRecords(pair.other._sending._key, pair.other._receiving._key)
        with made.sender, made.receiver, pytest.raises(EncryptionFailed, match="changed on their way"):
            made.pass_on(changed + bytes(PIECE + 20))  # enough for any length that it may tell now


@pytest.mark.parametrize("order", [[0, 0], [1], [1, 0]], ids=["repeated", "left out", "swapped"])
def test_records_are_taken_once_and_in_their_order(pair: Pair, order: list[int]) -> None:
    records = [bytes(pair.one.seal(memoryview(each))) for each in (b"first", b"second")]
    for number in order:
        pair.sender.sendall(records[number])
    with pytest.raises(EncryptionFailed):
        pair.read(100)


def test_a_record_that_is_sent_back_is_not_one_of_the_other_end(pair: Pair) -> None:
    pair.receiver.sendall(pair.one.seal(memoryview(b"mine")))
    with pytest.raises(EncryptionFailed):
        pair.one.receive(pair.sender, memoryview(bytearray(4)))


def test_keys_change_at_the_same_record_on_both_ends(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_records, "_RECORDS_PER_KEY", 3)
    keys = set()
    for number in range(10):
        pair.sender.sendall(pair.one.seal(memoryview(b"%d" % number)))
        assert pair.read(10) == b"%d" % number
        assert pair.one._sending._key == pair.other._receiving._key
        keys.add(pair.one._sending._key)
    assert len(keys) == 4


def test_the_end_is_the_end_of_the_socket(pair: Pair) -> None:
    pair.sender.sendall(pair.one.seal(memoryview(b"text"))[:-1])
    pair.sender.close()
    assert pair.read(4) == b""


def test_little_memory_is_held_until_there_is_a_long_record(pair: Pair) -> None:
    pair.sender.sendall(pair.one.seal(memoryview(b"proof")))
    assert pair.read(5) == b"proof"
    assert len(pair.other._received) + len(pair.one._sealed) <= 8 << 10


@pytest.mark.parametrize("able", [(True, True), (True, False), (False, True), (False, False)])
def test_where_one_end_cannot_seal_tls_carries_the_bytes(
    able: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = socket.socketpair()
    for each in raw:
        each.setblocking(False)
    ends = [EncryptedSocket(each, of_this_process(), role) for each, role in zip(raw, Role, strict=True)]
    are_ready = [False, False]
    while not all(are_ready):
        for place, end in enumerate(ends):
            monkeypatch.setattr(sealed_records, "CAN_SEAL", able[place])
            are_ready[place] = end.handshake()
    assert [end._sealed is not None for end in ends] == [all(able)] * 2
    sent, received = os.urandom(300_000), bytearray()
    left = memoryview(sent)
    while len(received) < len(sent):
        with suppress(BlockingIOError):
            left = left[ends[0].send(left) :] if left else left
        with suppress(BlockingIOError):
            received += ends[1].recv(100_000)
    assert received == sent
    for end in ends:
        end.close()
