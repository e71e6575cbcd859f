"""CUDA tensors on one device: gradients, state, commits, and workers that share it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import farandole as fd
from farandole.errors import ConfigError
from farandole.testing.proof import Proof
from farandole.testing.running_job import all_training
from farandole.training.collectives.alone import AloneTransport
from farandole.training.collectives.device_transport import DeviceTransport, StagedTransport
from farandole.training.collectives.nccl_transport import NcclGroups, own_nccl_problem
from farandole.training.collectives.ring import RingTransport
from farandole.training.optim.buckets import Arrivals
from farandole.training.state.tensor_digest import digest_of
from farandole.training.worker.step_randomness import reseed
from tests.checks.running import explain, problems
from tests.integration.test_elastic_job import SAMPLES, EndlessJob, beyond, job
from tests.scripts.process_group_on_a_device import CHECKS
from tests.support import rings
from tests.support.jobs import SCRIPTS, check_job
from tests.support.rings import listeners

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

START_S = 150.0
DEVICE = torch.device("cuda", 0)


# Transports ------------------------------------------------------------------------------------------------


def test_alone_a_tensor_on_a_device_stays_as_it_is() -> None:
    tensor = torch.arange(5.0, device=DEVICE)
    assert AloneTransport().all_reduce(tensor, b"note") == [b"note"]
    AloneTransport().broadcast(tensor, 0)
    assert tensor.tolist() == [0, 1, 2, 3, 4]


def test_staging_memory_is_pinned() -> None:
    staged = StagedTransport(AloneTransport())
    staged.all_reduce(torch.ones(1000, device=DEVICE))
    assert staged._memory.is_pinned()


@pytest.mark.parametrize("is_required", [False, True])
@pytest.mark.skipif(bool(own_nccl_problem()), reason=own_nccl_problem())
def test_two_workers_on_one_device_do_without_nccl(is_required: bool) -> None:
    tensors = [torch.full((1000,), 1.0 + rank, device=DEVICE) for rank in range(2)]
    with listeners(2) as opened:
        built = [each for each in rings.build(opened).transports if isinstance(each, RingTransport)]
        made = [DeviceTransport(ring, ring, NcclGroups(), is_required) for ring in built]
        outcomes = rings.outcomes_in_threads(2, lambda rank: made[rank].all_reduce(tensors[rank], b"note"))
        for each in made:
            each.close()
    if is_required:
        assert [type(outcome) for outcome in outcomes] == [ConfigError] * 2
        assert "share a device" in str(outcomes[0])
    else:
        assert outcomes == [[b"note"] * 2] * 2
        assert all(tensor.eq(3.0).all() for tensor in tensors)


# Gradients and state ---------------------------------------------------------------------------------------


def test_another_thread_sees_what_several_streams_have_put_into_a_bucket() -> None:
    bucket, arrivals = torch.zeros(2_000_000, device=DEVICE), Arrivals(DEVICE)
    torch.cuda.synchronize()
    for half in bucket.split(1_000_000):
        with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
            torch.cuda._sleep(200_000_000)  # some 0.1 s
            half.fill_(3.0)
            arrivals.record()
    sums: list[float] = []
    thread = threading.Thread(target=arrivals.before(lambda: sums.append(bucket.sum().item())))
    thread.start()
    thread.join(30)
    assert sums == [6_000_000.0]


def test_a_digest_does_not_depend_on_the_device() -> None:
    tensors = [
        torch.randn(1001),
        torch.randn(70_000),
        torch.arange(7),
        torch.randn(64, 3).bfloat16(),
        torch.tensor(2.0),
    ]
    assert digest_of(tensors) == digest_of([tensor.to(DEVICE) for tensor in tensors])


def test_a_step_that_is_repeated_draws_the_same_numbers_on_the_device() -> None:
    def draw(step: int) -> list[float]:
        reseed(3, step, 0)
        return torch.rand(4, device=DEVICE).tolist()

    assert draw(7) == draw(7) != draw(8)


def test_a_mean_is_where_the_tensor_was() -> None:
    fd.init()
    try:
        mean = fd.mean(torch.ones(3, device=DEVICE))
    finally:
        fd.shutdown()
    assert mean.device == DEVICE
    assert mean.tolist() == [1, 1, 1]


@pytest.mark.parametrize("device", [DEVICE, torch.device("cpu")], ids=str)
def test_an_alltoall_returns_the_numbers_of_rows_where_the_splits_were(device: torch.device) -> None:
    fd.init()
    try:
        rows, received = fd.alltoall(torch.arange(3.0, device=DEVICE), splits=torch.tensor([2], device=device))
    finally:
        fd.shutdown()
    assert (rows.device, received.device) == (DEVICE, device)
    assert (rows.tolist(), received.tolist()) == ([0, 1], [2])


@pytest.mark.parametrize("fused", [False, True])
def test_a_commit_is_in_the_hosts_memory_and_comes_back_to_the_device(fused: bool) -> None:
    fd.init()
    try:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).to(DEVICE)
        optimizer = fd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused))
        state = fd.elastic.TorchState(model, optimizer, batch=0)

        def train() -> None:
            optimizer.zero_grad()
            model(torch.randn(4, 8, device=DEVICE)).square().sum().backward()
            optimizer.step()

        train()
        state.commit()
        targets = [target for each in state._handlers.values() for target in each._snapshot._targets]
        assert {target.device.type for target in targets} == {"cpu"}
        expected = [each.clone() for each in (*model.state_dict().values(), *moments(optimizer))]
        train()
        state.restore()
        restored = [*model.state_dict().values(), *moments(optimizer)]
        assert all(torch.equal(each, other) for each, other in zip(restored, expected, strict=True))
        assert {each.device for each in moments(optimizer)} == {DEVICE}
        train()
    finally:
        fd.shutdown()


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [entry[name] for entry in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]


# Jobs ------------------------------------------------------------------------------------------------------


def test_one_worker_trains_on_its_device(tmp_path: Path) -> None:
    with job(tmp_path, ["-np", "1"], "--device", "cuda:0") as running:
        assert running.wait(START_S) == 0, (tmp_path / "output").read_text()
    check_job(Proof(tmp_path), epochs=3, samples=SAMPLES, workers_at_end=1)


@pytest.mark.parametrize(("transport", "bucket_mb"), [("auto", ""), ("shm", "0"), ("tcp", "0.0001")])
def test_workers_that_share_a_device_survive_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, bucket_mb: str
) -> None:
    """Its replacement copies parameters and AdamW's tensors from the device of the survivor to its own."""
    if bucket_mb:
        monkeypatch.setenv("FARANDOLE_BUCKET_MB", bucket_mb)
    with EndlessJob(
        tmp_path, ["-np", "2", "--restarts", "9", "--transport", transport], "--device", "cuda:0"
    ) as running:
        latest = running.wait_until(all_training(2), START_S)
        for rank in (1, 0):
            generation = latest[0]["generation"]
            running.kill(latest[rank]["pid"])
            latest = running.wait_until(beyond(generation, 2), START_S)
        running.finish()
    check_job(Proof(tmp_path), samples=SAMPLES, workers_at_end=2)


def test_workers_on_a_device_and_on_the_cpu_train_together(tmp_path: Path) -> None:
    """As fd.device() has it where there is one device for two. Their kernels round differently, so bits may differ."""
    if torch.cuda.device_count() > 1:
        pytest.skip("there is a device for each of them")
    with EndlessJob(tmp_path, ["-np", "2"], "--device", "slot") as running:
        running.wait_until(all_training(2), START_S)
        running.finish()


@pytest.mark.skipif(bool(own_nccl_problem()), reason=own_nccl_problem())
def test_nccl_is_refused_to_workers_that_share_a_device(tmp_path: Path) -> None:
    with job(tmp_path, ["-np", "2", "--transport", "nccl"], "--device", "cuda:0") as running:
        assert running.wait(START_S) != 0
    assert "ranks 0, 1 share a device; use auto" in (tmp_path / "output").read_text()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a CUDA device for each of two workers")
@pytest.mark.parametrize("bucket_mb", ["0", "0.0001"])
def test_workers_with_a_device_each_survive_a_kill_through_nccl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket_mb: str
) -> None:
    monkeypatch.setenv("FARANDOLE_BUCKET_MB", bucket_mb)
    flags = ["-np", "2", "--restarts", "9", "--transport", "nccl"]
    with EndlessJob(tmp_path, flags, "--device", "slot") as running:
        latest = running.wait_until(all_training(2), START_S)
        for rank in (1, 0):
            generation = latest[0]["generation"]
            running.kill(latest[rank]["pid"])
            latest = running.wait_until(beyond(generation, 2), START_S)
        running.finish()
    check_job(Proof(tmp_path), samples=SAMPLES, workers_at_end=2)


# The backend of torch.distributed ----------------------------------------------------------------------------


@pytest.mark.parametrize("check", CHECKS)
def test_collectives_of_the_backend_farandole(check: str) -> None:
    said = problems(SCRIPTS / "process_group_on_a_device.py", 2, check, DEVICE="cuda")
    assert said.get(check) == [None] * 2, explain(said, check)
