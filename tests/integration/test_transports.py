"""What every transport must do, among one rank (no socket) to four, which are threads."""

from __future__ import annotations

import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import cache

import pytest
import torch

from farandole.errors import CollectiveMismatch, GenerationEnded, PeerLost
from farandole.training.collectives.connection_pair import DTYPES
from farandole.training.collectives.hierarchical_transport import layout
from farandole.training.collectives.transport import Reduction, Transport
from tests.support import rings
from tests.support.rings import DEADLINE_S, HOSTS, LASTING_GLOO, Ring, listeners, needs_reconfigure

SIZES = [1, 2, 3, 4]
Call = Callable[[Transport], object]


class Kind:
    """Of the transports that the test makes now."""

    choice = "tcp"


KINDS = [
    *("tcp", "shm", "hierarchical"),
    pytest.param("gloo", marks=pytest.mark.core),
    pytest.param(LASTING_GLOO, id="lasting-gloo", marks=[pytest.mark.core, needs_reconfigure]),
    "device",  # what tensors on devices take, in the host's memory: see rings.with_devices()
    *(pytest.param(each, marks=pytest.mark.gpu) for each in ("cuda", "nccl")),
]


@pytest.fixture(params=KINDS, autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param in ("cuda", "nccl") and not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    monkeypatch.setattr(Kind, "choice", request.param)


def ring(size: int, check: Callable[[], None] | None = None) -> AbstractContextManager[Ring]:
    skip_without_devices(size)
    return rings.ring(size, check, Kind.choice)


def skip_without_devices(size: int) -> None:
    if Kind.choice == "nccl" and torch.cuda.device_count() < size:
        pytest.skip(f"NCCL needs a CUDA device for each of {size} ranks, there are {torch.cuda.device_count()}")


def inputs(size: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """One tensor for each rank, of small integers: their sum is exact in every dtype."""
    return [((torch.arange(numel) + 3 * rank) % 11 - (dtype.is_signed * 5)).to(dtype) for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_sums_every_dtype_at_every_length(size: int) -> None:
    with ring(size) as world:
        for dtype in DTYPES:
            for numel in {0, 1, size - 1, 1000, 1_000_000 if dtype in (torch.float32, torch.bfloat16) else 50_000}:
                parts = inputs(size, numel, dtype)
                world.run(lambda transport, parts=parts: transport.all_reduce(parts[transport.rank]))
                expected = sum(inputs(size, numel, dtype), torch.zeros(numel, dtype=dtype))
                assert all(torch.equal(part, expected) for part in parts), (dtype, numel)


@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_takes_other_operations_than_the_sum(size: int) -> None:
    expected = {
        Reduction.MIN: lambda stacked: stacked.amin(dim=0),
        Reduction.MAX: lambda stacked: stacked.amax(dim=0),
        Reduction.PRODUCT: lambda stacked: stacked.prod(dim=0),
    }
    with ring(size) as world:
        for dtype, op, numel in itertools.product(DTYPES, expected, (0, 1, 1000, 50_000)):
            parts = [part % 4 for part in inputs(size, numel, dtype)]
            result = expected[op](torch.stack(parts)).to(dtype)
            world.run(lambda transport, parts=parts, op=op: transport.all_reduce(parts[transport.rank], op=op))
            assert all(torch.equal(part, result) for part in parts), (dtype, op, numel)


@pytest.mark.parametrize("size", [1, 2])
def test_a_reduction_that_no_transport_knows_is_refused(size: int) -> None:
    with ring(size) as world, pytest.raises(ValueError, match="SUM, MIN, MAX, PRODUCT"):
        world.run(lambda transport: transport.all_reduce(torch.zeros(1), op=Reduction.ADASUM))


def in_background(function: Callable[[], object]) -> Future[object]:
    future: Future[object] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - the test gets it
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future


WITHOUT_TENSORS: list[Callable[[Transport], object]] = [
    lambda transport: transport.barrier(),
    lambda transport: transport.all_gather(b"here"),
    lambda transport: transport.all_reduce(torch.empty(0), b"here"),  # a round of named operations
    lambda transport: transport.broadcast(torch.empty(0), 0),
]


@pytest.mark.parametrize("operation", WITHOUT_TENSORS)
def test_a_rank_that_waits_hears_that_another_one_has_begun(operation: Callable[[Transport], object]) -> None:
    with ring(3) as world, os.fdopen(os.eventfd(0), "wb", buffering=0) as wake:
        waiting = [in_background(lambda t=t: t.wait_for_peer(wake.fileno())) for t in world.transports[1:]]
        begun = in_background(lambda: operation(world.transports[0]))
        assert waiting[0].result(DEADLINE_S) is True
        joined = in_background(lambda: operation(world.transports[1]))
        assert waiting[1].result(DEADLINE_S) is True
        operation(world.transports[2])
        for each in (begun, joined):
            each.result(DEADLINE_S)


@pytest.mark.parametrize("size", [1, 2])
def test_a_rank_that_waits_is_woken_by_its_own_process(size: int) -> None:
    with ring(size) as world, os.fdopen(os.eventfd(1), "rb", buffering=0) as wake:
        assert world.transports[0].wait_for_peer(wake.fileno()) is False


def test_a_neighbour_that_goes_between_operations_is_no_news_until_it_is_needed() -> None:
    with ring(2) as world, os.fdopen(os.eventfd(0), "wb", buffering=0) as wake:
        world.transports[1].close()
        assert world.transports[0].wait_for_peer(wake.fileno()) is False
        again = in_background(lambda: world.transports[0].wait_for_peer(wake.fileno()))
        assert not again.done()
        assert world.hints[0] == []
        os.eventfd_write(wake.fileno(), 1)
        assert again.result(DEADLINE_S) is False
        with pytest.raises(PeerLost):
            world.transports[0].barrier()
        assert len(world.hints[0]) == 1


def test_an_abort_ends_waiting() -> None:
    with ring(2) as world, os.fdopen(os.eventfd(0), "wb", buffering=0) as wake:
        waiting = in_background(lambda: world.transports[0].wait_for_peer(wake.fileno()))
        world.transports[0].abort("worker w1 was lost")
        with pytest.raises(GenerationEnded, match="w1 was lost"):
            waiting.result(DEADLINE_S)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numel", [1000, 300_001])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_get_the_same_bits_though_rounding_is_not_associative(
    size: int, numel: int, dtype: torch.dtype
) -> None:
    parts = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    parts = [part.to(dtype) for part in parts]
    exact = torch.stack(parts).double().sum(dim=0)
    with ring(size) as world:
        world.run(lambda transport: transport.all_reduce(parts[transport.rank]))
    assert all(torch.equal(part.view(torch.uint8), parts[0].view(torch.uint8)) for part in parts)
    torch.testing.assert_close(parts[0].double(), exact, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("numel", [1000, 300_001])
def test_two_ranks_get_the_plain_sum_of_floats(numel: int) -> None:
    left, right = torch.randn(2, numel, generator=torch.Generator().manual_seed(0)).unbind()
    parts = [left.clone(), right.clone()]
    with ring(2) as world:
        world.run(lambda transport: transport.all_reduce(parts[transport.rank]))
    assert torch.equal(parts[0], left + right)


@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_takes_any_shape_and_stays_out_of_autograd(size: int) -> None:
    def reduce(transport: Transport) -> tuple[torch.Tensor, torch.Tensor]:
        scalar, parameter = torch.tensor(2.0), torch.nn.Parameter(torch.ones(3, 50, 70))
        transport.all_reduce(scalar)
        transport.all_reduce(parameter)
        return scalar, parameter

    with ring(size) as world:
        for scalar, parameter in world.run(reduce):
            assert scalar.item() == 2 * size
            assert parameter.shape == (3, 50, 70)
            assert torch.equal(parameter.detach(), torch.full((3, 50, 70), float(size)))


@pytest.mark.parametrize("numel", [0, 1, 100_000])
@pytest.mark.parametrize("size", SIZES)
def test_the_notes_of_all_ranks_ride_along(size: int, numel: int) -> None:
    with ring(size) as world:
        for length in (0, 1, 64, 5000):
            trailers = world.run(
                lambda transport, length=length: transport.all_reduce(
                    torch.ones(numel), bytes([65 + transport.rank]) * length
                )
            )
            assert trailers == [[bytes([65 + rank]) * length for rank in range(size)]] * size


@pytest.mark.parametrize("size", SIZES)
def test_all_gather_takes_payloads_of_different_lengths(size: int) -> None:
    with ring(size) as world:
        for unit in (0, 1, 100_000):
            gathered = world.run(
                lambda transport, unit=unit: transport.all_gather(bytes([transport.rank]) * (unit * transport.rank))
            )
            assert gathered == [[bytes([rank]) * (unit * rank) for rank in range(size)]] * size


def test_all_gather_takes_payloads_around_the_length_that_needs_a_second_round() -> None:
    with ring(3) as world:
        for lengths in ([504, 0, 504], [504, 505, 0], [505, 505, 505]):
            payloads = [bytes([rank + 1]) * length for rank, length in enumerate(lengths)]
            gathered = world.run(lambda transport, said=payloads: transport.all_gather(said[transport.rank]))
            assert gathered == [payloads] * 3


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_overwrites_everybody_with_the_source(size: int) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.uint8)
    with ring(size) as world:
        for dtype, source, numel in itertools.product(dtypes, range(size), (0, 1, 300_001)):
            parts = inputs(size, numel, dtype)
            world.run(lambda t, parts=parts, source=source: t.broadcast(parts[t.rank], source))
            assert all(torch.equal(part, parts[source]) for part in parts), (dtype, source, numel)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_nobody_leaves_a_barrier_before_all_have_come(size: int) -> None:
    left, gate = threading.Event(), threading.Event()

    def pass_barrier(transport: Transport) -> bool:
        if transport.rank == size - 1:
            assert gate.wait(10)
            early = left.is_set()
            transport.barrier()
            return not early
        if transport.rank == 0:
            gate.set()
        transport.barrier()
        left.set()
        return True

    with ring(size) as world:
        assert world.run(pass_barrier) == [True] * size


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_may_close_as_soon_as_its_own_part_is_done(size: int) -> None:
    """Nothing that a neighbour has not read yet is lost, and nobody takes the end for a failure."""

    def last_words(transport: Transport) -> float:
        tensor = torch.ones(500_000)
        transport.all_reduce(tensor)
        transport.barrier()
        transport.all_reduce(tensor[:1000])
        transport.all_reduce(tensor)
        transport.close()
        return tensor[-1].item()

    for _ in range(5):
        with ring(size) as world:
            assert world.run(last_words) == [float(size**2)] * size
            assert world.hints == [[]] * size


# Disagreement ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4])
def test_different_operations_are_an_error_on_every_rank_that_names_both(size: int) -> None:
    def call(transport: Transport) -> None:
        if transport.rank == 1:
            transport.barrier()
        else:
            transport.all_reduce(torch.zeros(100_000))

    with ring(size) as world:
        outcomes = world.outcomes(call)
        assert [type(outcome) for outcome in outcomes] == [CollectiveMismatch] * size
        for outcome in outcomes:
            assert "barrier with a trailer of 1 bytes (operation " in str(outcome)
            where = "_on_device" if Kind.choice in ("device", "nccl") else ""
            assert f"all_reduce{where} of 400000 bytes of float32 (operation " in str(outcome)
        again = world.outcomes(lambda transport: transport.barrier())
        assert [str(outcome) for outcome in again] == [str(outcome) for outcome in outcomes]


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.all_reduce(torch.zeros(10 + t.rank)),
        lambda t: t.all_reduce(torch.zeros(10, dtype=torch.float64 if t.rank else torch.int64)),
        lambda t: t.all_reduce(torch.zeros(10), b"x" * t.rank),
        lambda t: t.all_reduce(torch.zeros(100_000 + t.rank)),
        lambda t: t.broadcast(torch.zeros(10), t.rank),
    ],
    ids=["length", "dtype", "note", "long", "source"],
)
def test_the_same_operation_on_different_things_is_an_error_too(call: Call) -> None:
    with ring(2) as world:
        outcomes = world.outcomes(call)
    assert [type(outcome) for outcome in outcomes] == [CollectiveMismatch] * 2


# Endings ---------------------------------------------------------------------------------------------


@cache
def large(device: str) -> torch.Tensor:
    return torch.zeros(10_000_000, device=device)


def large_in_place() -> torch.Tensor:
    """Return 40 MB on rank 0's device: to move them there is no part of a collective."""
    return large("cuda:0" if Kind.choice in ("cuda", "nccl") else "cpu")


BLOCKING: dict[str, Call] = {
    "all_reduce": lambda transport: transport.all_reduce(torch.zeros(1)),
    "all_reduce of 40 MB": lambda transport: transport.all_reduce(large_in_place()),
    "all_gather": lambda transport: transport.all_gather(b"payload"),
    "broadcast": lambda transport: transport.broadcast(large_in_place(), 0),
    "barrier": lambda transport: transport.barrier(),
}


def seconds_from_abort_to_error(world: Ring, call: Call) -> float:
    """Rank 0 is alone in a collective when another thread aborts it."""
    entering = threading.Event()
    ended_s: list[float] = []

    def collective() -> None:
        entering.set()
        with pytest.raises(GenerationEnded, match="generation 1 has ended: worker w1 was lost"):
            call(world.transports[0])
        ended_s.append(time.monotonic())

    thread = threading.Thread(target=collective)
    thread.start()
    assert entering.wait(10)
    aborted_s = time.monotonic()
    world.transports[0].abort("worker w1 was lost")
    thread.join(10)
    assert ended_s, "the collective did not end"
    return ended_s[0] - aborted_s


@pytest.mark.parametrize("name", BLOCKING)
def test_an_abort_from_another_thread_ends_the_call_in_flight_within_5_ms(name: str) -> None:
    skip_without_devices(2)
    large_in_place()
    taken_s = []
    with listeners(2) as opened:
        for _ in range(15):
            world = rings.build(opened, choice=Kind.choice)
            taken_s.append(seconds_from_abort_to_error(world, BLOCKING[name]))
            with pytest.raises(GenerationEnded):
                world.transports[0].barrier()  # sticky
            for transport in world.transports:
                transport.close()
    print(f"abort of {name}: median {statistics.median(taken_s) * 1e3:.2f} ms, worst {max(taken_s) * 1e3:.2f} ms")
    assert min(taken_s) <= 0.005  # no timer and no poll is in the way; under load, the others wait for a core


def test_the_first_reason_of_an_abort_stands() -> None:
    with ring(2) as world:
        world.transports[0].abort("first")
        world.transports[0].abort("second")
        world.transports[0].close()
        world.transports[0].close()
        with pytest.raises(GenerationEnded, match="first"):
            world.transports[0].barrier()


def connected(rank: int, size: int) -> set[int]:
    """The ranks that it has connections to."""
    neighbours = {(rank - 1) % size, (rank + 1) % size}
    if Kind.choice == "hierarchical":
        here = layout(HOSTS[size], rank)
        neighbours |= {*here.mates, *here.across}
    return neighbours - {rank}


@pytest.mark.parametrize("name", BLOCKING)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_lost_rank_ends_the_call_of_everybody_else(size: int, name: str) -> None:
    """Also of those that are no neighbours of it: the failure goes around the ring."""
    lost = size - 1

    def call(transport: Transport) -> None:
        if transport.rank == lost:
            transport.close()
        else:
            BLOCKING[name](transport)
            transport.barrier()  # a broadcast may be through before the loss

    with ring(size) as world:
        outcomes = world.outcomes(call)
        survivors = [rank for rank in range(size) if rank != lost]
        for rank in survivors:
            error = outcomes[rank]
            assert isinstance(error, PeerLost), error
            assert error.generation == 1
            assert error.rank in connected(rank, size)
            with pytest.raises(PeerLost):
                world.transports[rank].barrier()
        assert [len(world.hints[rank]) for rank in survivors] == [1] * len(survivors)
        assert {hint[0][0] for hint in world.hints if hint} >= {f"w{lost}"}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_source_of_a_broadcast_may_go_before_the_others_have_read_it(size: int) -> None:
    """They have it, or learn that it is lost; nothing else."""

    def call(transport: Transport) -> float:
        tensor = torch.full((100_000,), float(transport.rank))
        transport.broadcast(tensor, 0)
        if transport.rank == 0:
            transport.close()
        return tensor[-1].item()

    for _ in range(20):
        with ring(size) as world:
            outcomes = world.outcomes(call)
            assert all(outcome == 0.0 or isinstance(outcome, PeerLost) for outcome in outcomes), outcomes


def test_an_abort_after_a_loss_is_what_later_calls_report() -> None:
    with ring(2) as world:
        world.transports[1].close()
        with pytest.raises(PeerLost):
            world.transports[0].barrier()
        world.transports[0].abort("worker w1 was lost")
        with pytest.raises(GenerationEnded, match="worker w1 was lost"):
            world.transports[0].barrier()


def test_what_check_raises_ends_the_transport_and_frees_the_neighbours() -> None:
    class LinkIsGone(Exception):
        pass

    def check() -> None:
        raise LinkIsGone

    with ring(2, check) as world:
        with pytest.raises(LinkIsGone):
            world.transports[0].barrier()
        with pytest.raises(GenerationEnded, match="interrupted by LinkIsGone"):
            world.transports[0].barrier()
        # At once: nothing waits for a second here. What reached it of rank 0 may be that this was in something else.
        with pytest.raises((PeerLost, CollectiveMismatch)):
            world.transports[1].all_reduce(torch.zeros(1))


@pytest.mark.parametrize("size", [1, 2])
def test_misuse_is_an_error_before_anything_is_sent(size: int) -> None:
    with ring(size) as world:
        with pytest.raises(ValueError, match="contiguous"):
            world.transports[0].all_reduce(torch.zeros(3, 2).t())
        with pytest.raises(ValueError, match="float8_e5m2"):
            world.transports[0].all_reduce(torch.zeros(3, dtype=torch.float8_e5m2))
        with pytest.raises(ValueError, match="source"):
            world.transports[0].broadcast(torch.zeros(3), 7)
        world.run(lambda transport: transport.barrier())
