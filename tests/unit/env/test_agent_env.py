"""What an agent says to a worker, read without an environment."""

from __future__ import annotations

import pytest

from farandole import env
from farandole.errors import ConfigError


def test_nothing_said_is_nothing_read() -> None:
    assert env.read_worker_env({}) is None
    assert env.read_fixed_env({}) is None


def test_what_an_agent_says_comes_back() -> None:
    said = env.worker_environment("@farandole-1", "w3", "secret", 2)
    assert env.read_worker_env(said) == env.WorkerEnv("@farandole-1", "w3", "secret", 2)


def test_half_of_what_an_agent_says_is_refused() -> None:
    said = env.worker_environment("@farandole-1", "w3", "secret", 2)
    del said["FARANDOLE_SECRET"]
    with pytest.raises(ConfigError, match="lacks FARANDOLE_SECRET"):
        env.read_worker_env(said)
