"""The transport through Gloo where it differs from the others: what is under way inside of Gloo when a rank ends."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from farandole.collectives.connection_pair import dtype_code
from farandole.collectives.gloo_transport import GlooTransport, use_gloo
from farandole.collectives.ring import Header, RingTransport, TransportOperation
from farandole.collectives.transport import Reduction
from farandole.errors import ConfigError, GenerationEnded, PeerLost
from farandole.testing.proof import Proof
from farandole.testing.running_job import all_training
from tests.support import rings
from tests.support.jobs import ELASTIC_JOB, RunningJob, check_job
from tests.support.rings import DEADLINE_S, listeners

NUMEL = 1_000_000


@contextmanager
def stuck() -> Iterator[tuple[GlooTransport, RingTransport, torch.Tensor, Future[object]]]:
    """Rank 0 in an all_reduce of Gloo's, for which rank 1 has agreed but does nothing: its transport, the other
    rank's ring, the tensor, and what becomes of the call."""
    with listeners(2) as opened:
        pair = [each for each in rings.build(opened).transports if isinstance(each, RingTransport)]
        transports = rings.in_threads(2, lambda rank: use_gloo(pair[rank]))
        tensor, outcome = torch.full((NUMEL,), 7.0), Future[object]()

        def reduce() -> None:
            try:
                outcome.set_result(transports[0].all_reduce(tensor))
            except BaseException as error:  # noqa: BLE001 - the test gets it
                outcome.set_exception(error)

        threading.Thread(target=reduce, daemon=True).start()
        header = Header(
            TransportOperation.ALL_REDUCE, pair[1].next_sequence, dtype_code(tensor.dtype), Reduction.SUM, 4 * NUMEL, 0
        )
        pair[1].exchange(header, b"")
        until(lambda: transports[0]._group._work is not None)
        try:
            yield transports[0], pair[1], tensor, outcome
        finally:
            for transport in transports:
                transport.close()
            until(lambda: not releasing())


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.001)


def releasing() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "farandole-gloo-release"]


def test_an_abort_ends_an_operation_inside_of_gloo_within_5_ms_and_leaves_the_tensor_alone() -> None:
    taken_s = []
    for _ in range(10):
        with stuck() as (transport, _, tensor, outcome):
            aborted_s = time.monotonic()
            transport.abort("worker w1 was lost")
            with pytest.raises(GenerationEnded, match="w1 was lost"):
                outcome.result(DEADLINE_S)
            taken_s.append(time.monotonic() - aborted_s)
        assert tensor.eq(7.0).all()  # also after the operation, and the group, have ended
    print(f"abort inside of Gloo: median {statistics.median(taken_s) * 1e3:.2f} ms, worst {max(taken_s) * 1e3:.2f} ms")
    assert statistics.median(taken_s) <= 0.005


def test_a_rank_that_is_lost_ends_an_operation_inside_of_gloo() -> None:
    with stuck() as (transport, others_ring, tensor, outcome):
        others_ring.close()
        with pytest.raises(PeerLost):
            outcome.result(DEADLINE_S)
        with pytest.raises(PeerLost):
            transport.barrier()
    assert tensor.eq(7.0).all()


def test_200_generations_leave_no_descriptor_and_no_thread_behind() -> None:
    def counts() -> tuple[int, int]:
        until(lambda: not releasing())
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    with listeners(2) as opened:
        for number in range(1, 201):
            if number == 3:
                before = counts()
            world = rings.build(opened, number, choice="gloo")
            parts = [torch.ones(1000), torch.ones(1000)]
            world.run(lambda transport, parts=parts: transport.all_reduce(parts[transport.rank]))
            for transport in world.transports:
                transport.close()
        until(lambda: counts() <= before)


def test_an_address_that_gloo_cannot_use_is_an_error_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    with listeners(2) as opened:
        pair = [each for each in rings.build(opened).transports if isinstance(each, RingTransport)]
        monkeypatch.setattr(type(pair[0]._connections), "host", property(lambda _: "no.such.host.invalid"))
        outcomes = rings.outcomes_in_threads(2, lambda rank: use_gloo(pair[rank]))
        for each in pair:
            each.close()
    assert [type(outcome) for outcome in outcomes] == [ConfigError] * 2
    assert "rank 0: cannot listen at no.such.host.invalid" in str(outcomes[1])


def test_a_job_over_gloo_survives_a_kill(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    words = ["--epochs", "1000000", "--stop", str(stop)]
    flags = ["-np", "2", "--transport", "gloo"]
    with RunningJob(flags, ELASTIC_JOB, words, tmp_path, tmp_path / "output") as running:
        latest = running.wait_until(all_training(2), 60)
        running.kill(latest[1]["pid"])
        running.wait_until(lambda now: all_training(2)(now) and now[0]["generation"] > latest[0]["generation"] + 1, 60)
        stop.touch()
        assert running.wait(60) == 0, (tmp_path / "output").read_text()
    check_job(Proof(tmp_path), samples=600, workers_at_end=2)
