"""Every run says the seed of its random schedules, and can be given one: pytest --hypothesis-seed=N. In the tests' own
process torch computes with one thread."""

from __future__ import annotations

import gc
import random
import sys

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(random.SystemRandom().randrange(2**32))


def pytest_report_header(config: pytest.Config) -> str:
    return f"random seed: --hypothesis-seed={config.option.hypothesis_seed}"


def pytest_collection_finish() -> None:
    """The tests' tensors are small, and their ranks are threads: torch's own threads would only wait, and busily so.
    The modules and the collected tests are excluded from the garbage collection, each run of which took 0.3 s."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    gc.collect()
    gc.freeze()
