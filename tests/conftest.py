"""Every run says the seed of its random schedules, and can be given one: pytest --hypothesis-seed=N."""

from __future__ import annotations

import random

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(random.SystemRandom().randrange(2**32))


def pytest_report_header(config: pytest.Config) -> str:
    return f"random seed: --hypothesis-seed={config.option.hypothesis_seed}"
