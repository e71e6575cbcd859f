"""The loader in strict mode: the shards of each global batch, whoever gets them; and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import TensorDataset

from farandole.errors import ConfigError, DataError
from farandole.training.data.loader import DataLoader
from farandole.training.data.partition import BatchLayout, batches, delivered, make_global_batch
from farandole.training.data.stream_loader import StreamLoader
from farandole.training.state import step
from farandole.training.state.shard_audit import AuditRule

DATA = TensorDataset(torch.arange(100))


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MKL_CBWR", "AUTO,STRICT")
    yield
    step.close()


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("cursor", [0, 24, 96])
def test_each_shard_is_the_same_part_of_a_global_batch_in_every_world(world: int, cursor: int) -> None:
    layout = BatchLayout(size=100, global_batch_size=24, shards=8)
    found = {}
    for rank in range(world):
        global_batch = make_global_batch(layout, 0, cursor, rank, world)
        bodies = batches(global_batch)
        assert len(bodies) == global_batch.micro_batches == -(-8 // world)
        assert sum(each.samples for each in bodies) == global_batch.samples
        for each in bodies:
            if each.shard >= 0:
                found[each.shard] = each.low, each.high
            else:
                assert each.is_dummy
    samples = min(24, 100 - cursor)
    assert found == {shard: (cursor + shard * samples // 8, cursor + (shard + 1) * samples // 8) for shard in range(8)}


def test_shards_with_a_least_size_leave_some_empty() -> None:
    layout = BatchLayout(size=100, global_batch_size=24, min_local_batch=3, shards=8)
    sizes = [each.samples for each in batches(make_global_batch(layout, 0, 96, 0, 1), 3)]
    assert sizes == [4, 0, 0, 0, 0, 0, 0, 0]


def test_a_number_of_shards_that_does_not_divide_the_global_batch_is_refused_with_those_that_fit() -> None:
    with pytest.raises(DataError, match=r"24 cannot be divided into 5 equal shards.*fit: 6, 8, 12, 24;.*fits: 25"):
        DataLoader(DATA, 24, shards=5)


@pytest.mark.parametrize("shards", [0, -1, 5000])
def test_a_number_of_shards_that_makes_no_sense_is_refused(shards: int) -> None:
    with pytest.raises(DataError, match=r"shards must be in 1\.\.4096"):
        DataLoader(DATA, 24, shards=shards)


def test_more_workers_than_shards_are_refused() -> None:
    loader = DataLoader(DATA, 24, shards=4)
    loader.set_world(3, 4)
    with pytest.raises(DataError, match=r"5 workers, but each global batch has 4 shards.*--max-np 4"):
        loader.set_world(0, 5)


def test_an_audit_is_a_fraction_of_the_shards_of_a_strict_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (-0.1, 1.5):
        with pytest.raises(ConfigError, match="a fraction of the shards, from 0 to 1"):
            DataLoader(DATA, 24, shards=4, audit=wrong)
    with pytest.raises(ConfigError, match=r"audit=0\.5 needs strict mode"):
        DataLoader(DATA, 24, audit=0.5)
    monkeypatch.setenv("FARANDOLE_AUDIT", "2")
    with pytest.raises(ConfigError, match="FARANDOLE_AUDIT"):
        DataLoader(DATA, 24, shards=4)


def test_the_first_body_of_an_audited_step_has_the_samples_of_another_rank_s_shard() -> None:
    layout = BatchLayout(size=100, global_batch_size=24, shards=8, audit=AuditRule(1.0, 0))
    for rank in range(3):
        global_batch = make_global_batch(layout, 0, 24, rank, 3)
        audited, *own = batches(global_batch)
        assert global_batch.audit is not None
        owner = (rank + global_batch.audit.shift) % 3
        theirs = batches(make_global_batch(layout, 0, 24, owner, 3))[1:]
        (same,) = [each for each in theirs if each.shard == audited.shard]
        assert (audited.low, audited.high, audited.samples) == (same.low, same.high, 3)
        assert delivered(audited) == (same.low, same.high)
        assert audited.is_audit
        assert audited.is_dummy
        assert [each.shard for each in own] == [each.shard for each in batches(global_batch)[1:]]
        assert sum(each.samples for each in own) == global_batch.samples
        assert len(own) + 1 == global_batch.micro_batches


def test_the_job_decides_unless_the_loader_has_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DataLoader(DATA, 24).shards == 0
    monkeypatch.setenv("FARANDOLE_SHARDS", "6")
    assert DataLoader(DATA, 24).shards == 0
    assert DataLoader(DATA, 24, strict=True).shards == 6
    monkeypatch.setenv("FARANDOLE_STRICT", "1")
    assert DataLoader(DATA, 24).shards == 6
    assert DataLoader(DATA, 24, shards=12).shards == 12
    assert DataLoader(DATA, 24, strict=False).shards == 0
    with pytest.raises(ConfigError, match="strict=False and shards=3 contradict"):
        DataLoader(DATA, 24, strict=False, shards=3)
    with pytest.raises(ConfigError, match=r"--strict: the samples of a StreamLoader"):
        StreamLoader(iter([]), 8)


def test_a_limit_of_the_loop_body_divides_shards_further() -> None:
    assert DataLoader(DATA, 24, shards=4, micro_batch_size=4).shards == 8
    assert DataLoader(DATA, 24, shards=4, max_local_batch=6).shards == 4


def test_a_saved_number_of_shards_is_kept() -> None:
    saved = DataLoader(DATA, 24, shards=6).state_dict()
    loader = DataLoader(DATA, 24, strict=True)
    loader.load_state_dict(saved)
    assert loader.shards == 6
    with pytest.raises(DataError, match="the saved loader has 6 shards, this one 8"):
        DataLoader(DATA, 24, shards=8).load_state_dict(saved)
    strict = DataLoader(DATA, 24, shards=8)
    strict.load_state_dict(DataLoader(DATA, 24).state_dict())
    assert strict.shards == 8
    plain = DataLoader(DATA, 24)
    plain.load_state_dict(saved)
    assert plain.shards == 0
