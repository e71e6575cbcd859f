"""Data that cannot be had, in real jobs: the original traceback, and the job goes on or stops as it should."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.jobs import SCRIPTS, farandole_run

OTHER_DATA_SET = """
import farandole as fd, torch
fd.init()
sampler = fd.elastic.ElasticSampler(range(100))
for batch in torch.utils.data.DataLoader(range(120), batch_size=10, sampler=sampler, num_workers=2):
    print("read", flush=True)
"""

JOB = [sys.executable, str(SCRIPTS / "bad_data_job.py")]


def test_a_data_set_that_raises_on_one_worker_costs_that_worker_and_shows_its_own_traceback(tmp_path: Path) -> None:
    done = farandole_run("-np", "2", *JOB, "--marks", str(tmp_path / "raised"), "--once", "--num-workers", "1")
    assert done.returncode == 0, done.stderr
    assert "in __getitem__" in done.stderr
    assert "having raised OSError: picture 17 cannot be decoded\n" in done.stderr


def test_a_data_set_that_raises_on_every_worker_ends_the_job_without_restarts(tmp_path: Path) -> None:
    done = farandole_run("-np", "2", *JOB, "--marks", str(tmp_path / "raised"))
    assert done.returncode == 1
    assert "in __getitem__" in done.stderr
    assert "raised the same exception: OSError: picture 17 cannot be decoded. Restarting" in done.stderr


def test_a_sampler_of_another_data_set_is_named_by_every_worker_before_anything_is_read() -> None:
    done = farandole_run("-np", "2", sys.executable, "-c", OTHER_DATA_SET)
    assert done.returncode == 1
    assert "ElasticSampler was made for 100 samples, but the data set of the DataLoader" in done.stderr
    assert "read" not in done.stdout
    assert "Exception in thread" not in done.stderr


WITHOUT_A_STATE = """
import sys
import farandole as fd, torch
from torch.utils.data import DataLoader, TensorDataset
fd.init()
torch.manual_seed(0)
samples = torch.randn(40, 3)
data = TensorDataset(samples[fd.rank() :: fd.size()] if sys.argv[1] == "divided" else samples)
model = torch.nn.Linear(3, 1)
optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
for (x,) in DataLoader(data, batch_size=4, shuffle=True):
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("way", ["undivided", "divided"])
def test_a_job_whose_workers_each_train_on_all_samples_says_so_in_its_last_line(way: str) -> None:
    done = farandole_run("-np", "2", sys.executable, "-c", WITHOUT_A_STATE, way)
    assert done.returncode == 0, done.stderr
    last = done.stderr.splitlines()[-1]
    assert ("each worker trained on all 40 samples: torch's DataLoader with a RandomSampler" in last) == (
        way == "undivided"
    ), last
    assert ("success" in last) == (way == "divided"), last
