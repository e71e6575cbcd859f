"""Connections with TLS, over real sockets: data, control, and a whole job that loses a worker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from farandole.base.config import JobConfig
from farandole.base.events.job_events import ConnectionRefused
from farandole.base.machine import now_s
from farandole.base.membership import GenerationId
from farandole.base.wire.authentication import Role, new_token
from farandole.base.wire.encryption import load_certificates
from farandole.errors import AuthenticationError, CollectiveMismatch, PeerLost, ProtocolError
from farandole.job.coordinator.server import Coordinator, CoordinatorSetup
from farandole.job.launch.control_client import Client
from farandole.testing.proof import Proof
from farandole.testing.running_job import all_training
from farandole.training.collectives.connection_pair import Broken, ConnectionPair, PeerCalled
from farandole.training.collectives.data_listener import DataListener
from farandole.training.collectives.encrypted_socket import EncryptedSocket
from farandole.training.collectives.point_to_point import Endpoint, PointToPoint
from farandole.training.collectives.ring_builder import RingBuilder
from tests.support.certificates import made, of_this_process
from tests.support.jobs import ELASTIC_JOB, RunningJob, check_job, farandole
from tests.support.rings import KEY, build, listeners, make_start
from tests.support.waiting import DEADLINE_S, EventLog, run

LONG_S = 60.0  # in place of the second after which a pair looks around

# Data connections -----------------------------------------------------------------------------------------------------


def encrypted_pair() -> tuple[EncryptedSocket, EncryptedSocket]:
    """A dialer's and a listener's end, after their handshake."""
    raw = socket.socketpair()
    for each in raw:
        each.setblocking(False)
    dialer = EncryptedSocket(raw[0], of_this_process(), Role.DIALER)
    listener = EncryptedSocket(raw[1], of_this_process(), Role.LISTENER)
    while not all([dialer.handshake(), listener.handshake()]):
        pass
    return dialer, listener


class Neighbours:
    """The connections of a rank, and the far ends: `next` reads from it, `previous` writes to it."""

    def __init__(self) -> None:
        to_next, self.next = encrypted_pair()
        self.previous, from_previous = encrypted_pair()
        self.pair = ConnectionPair(to_next, from_previous, None)

    def close(self) -> None:
        self.pair.close()
        self.next.close()
        self.previous.close()


@pytest.fixture
def neighbours() -> Iterator[Neighbours]:
    made = Neighbours()
    yield made
    made.close()


def test_more_bytes_than_buffers_hold_go_in_both_directions_at_once(neighbours: Neighbours) -> None:
    sent = os.urandom(3 << 20)
    received, echoed = bytearray(len(sent)), bytearray(len(sent))
    far = ConnectionPair(neighbours.previous, neighbours.next, None)
    with ThreadPoolExecutor(1) as pool:
        echo = pool.submit(far.move, deque([memoryview(sent)]), iter([memoryview(echoed)]), is_done_when_received=False)
        out = deque([memoryview(sent[:5]), memoryview(b""), memoryview(sent[5:])])
        assert neighbours.pair.move(out, iter([memoryview(received)]), is_done_when_received=False) is None
        assert echo.result(DEADLINE_S) is None
    assert received == echoed == sent


def test_what_was_received_together_with_other_bytes_is_seen_before_a_wait(neighbours: Neighbours) -> None:
    """No event of the kernel would tell of the rest of a record."""
    received = bytearray(3)
    neighbours.previous.send(b"onetwo")
    assert neighbours.pair.move(deque(), iter([memoryview(received)]), is_done_when_received=True) is None
    neighbours.pair.look_around(lambda: None, LONG_S)
    woken, wake = socket.socketpair()
    began_s = now_s()
    with woken, wake:
        assert neighbours.pair.interruption() == PeerCalled()
        assert neighbours.pair.wait_for_data(woken.fileno()) is True
    assert now_s() - began_s < LONG_S / 2
    assert neighbours.pair.peek(2) == b"tw"
    assert neighbours.pair.peek(100) == b"two"
    assert neighbours.pair.move(deque(), iter([memoryview(received)]), is_done_when_received=True) is None
    assert received == b"two"


def test_a_part_of_a_record_is_neither_data_nor_the_end(neighbours: Neighbours) -> None:
    assert neighbours.previous._sealed is not None
    record = neighbours.previous._sealed.seal(memoryview(b"text"))
    neighbours.previous.raw.send(record[:10])
    assert neighbours.pair.interruption() is None
    neighbours.previous.raw.send(record[10:])
    assert neighbours.pair.interruption() == PeerCalled()


@pytest.mark.parametrize("how", ["its end", "a shutdown by another thread"])
def test_the_end_of_a_neighbour_without_a_farewell_of_tls_is_seen_at_once(neighbours: Neighbours, how: str) -> None:
    def end() -> None:
        if how == "its end":
            neighbours.previous.close()
        else:
            neighbours.pair.shut_down()

    neighbours.pair.look_around(lambda: None, LONG_S)
    timer = threading.Timer(0.1, end)
    timer.start()
    began_s = now_s()
    broken = neighbours.pair.move(deque(), iter([memoryview(bytearray(5))]), is_done_when_received=True)
    timer.join()
    assert broken == Broken("receive", "end of file")
    assert now_s() - began_s < LONG_S / 2, "it was only found by the look around"


def test_the_reason_why_the_next_rank_stops_arrives(neighbours: Neighbours) -> None:
    ConnectionPair(neighbours.previous, neighbours.next, None).send_reason("other dtypes")
    with pytest.raises(CollectiveMismatch, match="other dtypes"):
        neighbours.pair.move(deque(), iter([memoryview(bytearray(5))]), is_done_when_received=True)


@pytest.mark.parametrize("place", [3, 8, -1])
def test_bytes_that_are_changed_on_their_way_break_the_connection(neighbours: Neighbours, place: int) -> None:
    assert neighbours.previous._sealed is not None
    record = bytearray(neighbours.previous._sealed.seal(memoryview(b"gradients")))
    record[place] ^= 1
    neighbours.previous.raw.send(record)
    broken = neighbours.pair.move(deque(), iter([memoryview(bytearray(9))]), is_done_when_received=True)
    assert broken == Broken("receive", "bytes were changed on their way")


def test_a_ring_with_tls_reduces_and_detects_the_loss_of_a_rank() -> None:
    with listeners(3, of_this_process()) as opened:
        world = build(opened)
        results = world.run(lambda each: _reduced(each, torch.full((50_000,), float(each.rank + 1))))
        assert all(bool((result == 6.0).all()) for result in results)
        world.transports[1].close()
        began_s = now_s()
        with pytest.raises(PeerLost):
            world.transports[2].all_reduce(torch.zeros(10))
        assert now_s() - began_s < 0.9
        for each in world.transports:
            each.close()


def _reduced(transport: object, tensor: torch.Tensor) -> torch.Tensor:
    transport.all_reduce(tensor)  # type: ignore[attr-defined]
    return tensor


def test_a_peer_without_tls_or_with_other_certificates_never_gets_in_and_is_named() -> None:
    for ours, theirs in (
        (of_this_process(), None),
        (None, of_this_process()),
        (of_this_process(), of_this_process("b")),
    ):
        with contextlib.closing(DataListener(tls=ours)) as one, contextlib.closing(DataListener(tls=theirs)) as other:
            builders = [
                RingBuilder(listener, make_start(rank, [one.address, other.address]), f"w{rank}", 0.5)
                for rank, listener in enumerate((one, other))
            ]
            with ThreadPoolExecutor(2) as pool:
                built = [pool.submit(each.build) for each in builders]
                for each in built:
                    with pytest.raises(PeerLost, match="lost rank"):
                        each.result(DEADLINE_S)


def test_messages_between_ranks_arrive_with_tls() -> None:
    made = [DataListener(tls=of_this_process()) for _ in range(2)]
    everybody = [Endpoint(f"w{rank}", listener.address) for rank, listener in enumerate(made)]
    generation = GenerationId(1, 1, 7, "nonce")
    one, other = (PointToPoint(each, generation, KEY, rank, everybody) for rank, each in enumerate(made))
    try:
        other.open()
        texts = [os.urandom(size) for size in (0, 1, 100, 1 << 20, 3)]
        for text in texts:
            one.send(1, b"subject", memoryview(text))
        assert [other.receive(0, b"subject") for _ in texts] == texts
    finally:
        one.close()
        other.close()


# Control connections --------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def serving(tls: str) -> AsyncIterator[tuple[Coordinator, EventLog, bytes]]:
    events, token = EventLog(), new_token()
    coordinator = Coordinator(CoordinatorSetup(JobConfig(num_proc=1, tls=tls), token, "job"), on_event=events)
    await coordinator.start()
    outcome = asyncio.create_task(coordinator.run())
    try:
        yield coordinator, events, token
    finally:
        outcome.cancel()
        await asyncio.wait([outcome], timeout=DEADLINE_S)


async def refusals(events: EventLog, count: int) -> list[str]:
    while len(events.of(ConnectionRefused)) < count:
        await events.next(ConnectionRefused)
    return [each.reason for each in events.of(ConnectionRefused)]


def test_wrong_certificates_and_tls_at_one_end_only_are_named_at_once_and_the_job_is_unharmed(tmp_path: Path) -> None:
    folder = made(tmp_path / "job")
    of_this_process()  # of the same name, and another authority

    async def test() -> None:
        async with serving(folder) as (coordinator, events, token):
            address, ours = coordinator.address, load_certificates(folder)
            for certificates, error, why in (
                (None, ProtocolError, "the listener uses TLS, and this side does not: give --tls DIR at both ends"),
                (of_this_process(), AuthenticationError, "the certificate of the listener is not of this job"),
            ):
                began_s = now_s()
                with pytest.raises(error, match=why):
                    await Client.dial(address, token, "job", certificates)
                assert now_s() - began_s < 3.0
            reasons = await refusals(events, 2)
            assert "the dialer does not use TLS 1.3" in reasons[0]
            assert "the dialer refuses this side's certificate" in reasons[1]
            client = await Client.dial(address, token, "job", ours)
            assert (await client.status()).job == "job"
            client.close()
        async with serving("") as (coordinator, events, token):
            with pytest.raises(AuthenticationError, match=r"the listener does not use TLS 1\.3"):
                await Client.dial(coordinator.address, token, "job", ours)
            assert "the dialer uses TLS, and this side does not" in (await refusals(events, 1))[0]
            (await Client.dial(coordinator.address, token, "job")).close()

    run(test())


def test_the_token_is_proved_inside_of_tls_too(tmp_path: Path) -> None:
    async def test() -> None:
        folder = made(tmp_path)
        async with serving(folder) as (coordinator, events, _):
            with pytest.raises(Exception, match="closed the connection after this side had proved the token"):
                await Client.dial(coordinator.address, new_token(), "job", load_certificates(folder))
            assert "the dialer did not prove the token" in (await refusals(events, 1))[0]

    run(test())


def test_a_stranger_that_sends_certificates_without_end_is_hung_up_on(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(made(tmp_path)) as (coordinator, events, _):
            reader, writer = await asyncio.open_connection(coordinator.address.host, coordinator.address.port)
            hello = b"\x01" + (1 << 20).to_bytes(3, "big") + bytes(16_000)
            with contextlib.suppress(ConnectionError):
                for start in range(10):
                    writer.write(
                        b"\x16\x03\x03" + len(hello).to_bytes(2, "big") + (hello if start == 0 else bytes(16_004))
                    )
                    await writer.drain()
                await reader.read(100)
                await reader.read(100)
            assert await refusals(events, 1)
            writer.transport.abort()

    run(test())


# A whole job ----------------------------------------------------------------------------------------------------------


def test_a_job_with_tls_goes_on_after_a_kill_and_answers_commands(tmp_path: Path) -> None:
    folder, records = made(tmp_path / "certificates"), tmp_path / "records"
    records.mkdir()
    stop = tmp_path / "stop"
    flags = ["-np", "3", "--transport", "tcp", "--tls", folder, "--job-file", str(tmp_path / "job")]
    words = ["--epochs", "1000000", "--stop", str(stop)]
    with RunningJob(flags, ELASTIC_JOB, words, records, tmp_path / "output") as running:
        latest = running.wait_until(all_training(3), 60)
        at_ns = running.kill(latest[1]["pid"])
        running.wait_until(lambda now: all_training(3)(now) and _generation(now) > _generation(latest), 60)
        shown = farandole("status", "--job-file", str(tmp_path / "job"))
        assert (shown.returncode, "3 of 3 workers" in shown.stdout) == (0, True), shown
        stop.touch()
        assert running.wait(60) == 0
    proof = Proof(records)
    check_job(proof, samples=600, workers_at_end=3)
    survivors = {latest[rank]["pid"] for rank in (0, 2)}
    first = proof.first_steps(latest[1]["generation"] + 1, survivors)
    assert all(at_ns < ns < at_ns + 2_000_000_000 for ns in first.values())


def _generation(latest: dict[int, dict[str, Any]]) -> int:
    return int(latest[0]["generation"])
