"""The default group of torch.distributed lives on over changes of the membership; what was made of ranks does not."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from functools import cache
from typing import Any

import pytest

from tests.support.jobs import SCRIPTS, farandole_run

pytestmark = pytest.mark.core

SIZES = [5, 4, 3, 2, 1]


@cache
def said() -> list[dict[str, Any]]:
    """One job, from five workers down to one, each killed in another operation."""
    with tempfile.TemporaryDirectory() as folder:
        done = farandole_run(
            *("-np", str(SIZES[0]), "--min-np", "1", "--restarts", "0"),
            *(sys.executable, str(SCRIPTS / "group_regroup_job.py"), folder),
            timeout_s=60,
        )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return [json.loads(line) for line in re.findall(r"\{.*\}", done.stdout)]


def of(event: str, size: int) -> list[dict[str, Any]]:
    return [each for each in said() if each["event"] == event and each["size"] == size]


@pytest.mark.parametrize("size", SIZES)
def test_ranks_and_size_follow_the_generation(size: int) -> None:
    assert sorted(each["c10d"] for each in of("entered", size)) == [
        [rank, size, list(range(size))] for rank in range(size)
    ]


@pytest.mark.parametrize("size", SIZES)
def test_the_same_group_reduces_over_the_workers_that_there_are(size: int) -> None:
    assert [each["total"] for each in of("reduced", size)] == [sum(range(size))] * size
    assert [each["gradient"] for each in of("reduced", size)] == [[1.0]] * size  # C++ divides by the size, too


@pytest.mark.parametrize("size", SIZES)
def test_a_device_mesh_is_made_anew(size: int) -> None:
    assert [each["members"] for each in of("reduced", size)] == [size] * size


@pytest.mark.parametrize("size", SIZES[:-1])
def test_a_lost_worker_raises_in_everybody_and_in_every_operation(size: int) -> None:
    raised = of("raised", size)
    assert sorted(each["rank"] for each in raised) == list(range(size - 1))
    assert all(each["is_known"] for each in raised)
    assert {each["what"] for each in raised} <= {"PeerLost", "GenerationEnded"}


@pytest.mark.parametrize("size", SIZES[1:])
def test_a_group_of_the_last_generation_says_what_to_do(size: int) -> None:
    for each in of("entered", size):
        assert each["is_forgotten"]
        if (size, each["rank"]) != (4, 0):  # which was no member of the first one
            assert "Create groups and device meshes again" in each["outdated"]


def test_the_last_one_is_alone_and_comes_to_its_end() -> None:
    assert [each["rank"] for each in said() if each["event"] == "end"] == [0]


def test_a_newcomer_is_a_world_of_one_until_it_is_admitted() -> None:
    done = farandole_run("-np", "2", sys.executable, str(SCRIPTS / "group_newcomer_job.py"))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    lines = [json.loads(line) for line in re.findall(r"\{.*\}", done.stdout)]
    (newcomer,) = [each for each in lines if each["event"] == "init" and each["size"] == 1]
    assert newcomer["reduced"] == 1.0
    admitted = [each for each in lines if each["event"] == "end"]
    assert [(each["size"], each["reduced"]) for each in admitted] == [(2, 2.0)] * 2
    (once_a_newcomer,) = [each["outdated"] for each in admitted if each["outdated"]]
    assert "this group was created for ranks [0]" in once_a_newcomer
