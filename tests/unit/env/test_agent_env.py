"""What an agent says to a worker, read without an environment."""

from __future__ import annotations

import os

import pytest

from farandole.base import env
from farandole.errors import ConfigError


def test_nothing_said_is_nothing_read() -> None:
    assert env.read_worker_env({}) is None
    assert env.read_fixed_env({}) is None


def test_what_an_agent_says_comes_back() -> None:
    told = env.WorkerEnv("@farandole-1", "w3", "secret", 2, "10.0.0.1", "/scratch", 0.5, "/page")
    assert env.read_worker_env(env.environment_of(told)) == told


def test_each_variable_of_a_worker_has_its_public_name() -> None:
    assert env.environment_of(env.WorkerEnv("@farandole-1", "w3", "secret", 2)) == {
        "FARANDOLE_AGENT": "@farandole-1",
        "FARANDOLE_WORKER": "w3",
        "FARANDOLE_SECRET": "secret",
        "FARANDOLE_SLOT": "2",
        "FARANDOLE_DATA_ADDRESSES": "127.0.0.1",
        "FARANDOLE_SCRATCH": "",
        "FARANDOLE_DETECTION_BUDGET": "3.0",
        "FARANDOLE_PAGE": "",
        "FARANDOLE_STORE": "",
        "FARANDOLE_GROUP_SECRET": "",
        "FARANDOLE_TLS": "",
    }


def test_only_settings_of_a_job_that_differ_from_the_defaults_are_written() -> None:
    assert env.environment_of(env.JobEnv()) == {}
    told = env.JobEnv(transport="tcp", sample_ledger="/ledger")
    assert env.environment_of(told) == {"FARANDOLE_TRANSPORT": "tcp", "FARANDOLE_SAMPLE_LEDGER": "/ledger"}
    assert env.read_job_env(env.environment_of(told)) == told
    assert env.read_job_env({"FARANDOLE_TRANSPORT": ""}) == env.JobEnv()


def test_half_of_what_an_agent_says_is_refused() -> None:
    said = env.environment_of(env.WorkerEnv("@farandole-1", "w3", "secret", 2))
    del said["FARANDOLE_SECRET"]
    with pytest.raises(ConfigError, match="lacks FARANDOLE_SECRET"):
        env.read_worker_env(said)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("FARANDOLE_SLOT", "two", "FARANDOLE_SLOT must be a whole number, got 'two'"),
        ("FARANDOLE_DETECTION_BUDGET", "-1", "FARANDOLE_DETECTION_BUDGET must be a number of seconds >= 0, got '-1'"),
        ("FARANDOLE_DETECTION_BUDGET", "inf", "FARANDOLE_DETECTION_BUDGET must be a number of seconds >= 0, got 'inf'"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_name(name: str, value: str, expected: str) -> None:
    said = env.environment_of(env.WorkerEnv("@farandole-1", "w3", "secret", 2))
    with pytest.raises(ConfigError) as caught:
        env.read_worker_env({**said, name: value})
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("FARANDOLE_CHECKPOINT_KEEP", "0", "FARANDOLE_CHECKPOINT_KEEP must be a whole number >= 1, got '0'"),
        ("FARANDOLE_CHECKPOINT_RUN_ID", "-1", "FARANDOLE_CHECKPOINT_RUN_ID must be a whole number >= 0, got '-1'"),
    ],
)
def test_checkpoint_settings_come_back_and_bad_ones_are_refused_by_name(name: str, value: str, expected: str) -> None:
    told = env.CheckpointEnv("s3://bucket", "500steps", 3, "step-1", 2, "host")
    assert env.read_checkpoint_env(env.environment_of(told)) == told
    assert env.read_checkpoint_env({"FARANDOLE_CHECKPOINT_KEEP": "3"}) is None
    with pytest.raises(ConfigError) as caught:
        env.read_checkpoint_env({**env.environment_of(told), name: value})
    assert str(caught.value) == expected


def test_the_number_of_workers_in_torchruns_variables_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("ROLE_WORLD_SIZE", raising=False)
    env.set_torchrun_world_size(3)
    assert os.environ["WORLD_SIZE"] == "3"
    assert "ROLE_WORLD_SIZE" not in os.environ


def test_a_worker_beyond_that_number_has_the_last_rank_and_keeps_its_local_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "ROLE_RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    env.set_torchrun_world_size(3)
    assert (os.environ["RANK"], os.environ["ROLE_RANK"]) == ("2", "2")
    assert (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]) == ("3", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    env.set_torchrun_world_size(3)
    assert (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]) == ("1", "3")
