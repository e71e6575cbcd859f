"""Every run says the seed of its random schedules, and can be given one: pytest --hypothesis-seed=N. In the tests' own
process torch computes with one thread."""

from __future__ import annotations

import fcntl
import gc
import os
import random
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# No example has a time limit of its own: on a busy machine each may take a second.
hypothesis.settings.register_profile("farandole", deadline=None)
hypothesis.settings.load_profile("farandole")

_MOST_FILES = 25


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(random.SystemRandom().randrange(2**32))
    # A shell without job control starts `make test &` with SIGINT ignored (POSIX, "Asynchronous Lists"), and nohup
    # ignores SIGHUP. Children inherit that; the tests send both to them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_report_header(config: pytest.Config) -> str:
    return f"random seed: --hypothesis-seed={config.option.hypothesis_seed}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out, without importing them, the files of which `-m "long and ..."` or `-m "not long and ..."` runs
    nothing: each lane imports all that it collects, frameworks included."""
    chosen = config.option.markexpr
    if collection_path.suffix != ".py" or not chosen.startswith(("long and ", "not long and ")):
        return None
    text = collection_path.read_text()
    if chosen.startswith("long"):
        return True if "pytest.mark.long" not in text else None
    return True if re.search(r"^pytestmark = .*pytest\.mark\.long\b", text, re.MULTILINE) else None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print which files took longest: `make test` has to stay within ten minutes."""
    seconds: Counter[str] = Counter()
    for each in (report for reports in terminalreporter.stats.values() for report in reports):
        if isinstance(each, pytest.TestReport):
            seconds[each.nodeid.partition("::")[0]] += each.duration
    if len(seconds) > _MOST_FILES:
        slowest = ", ".join(f"{file} {spent:.0f}" for file, spent in seconds.most_common(_MOST_FILES))
        terminalreporter.write_line(f"slowest files, in seconds, of {seconds.total():.0f} altogether: {slowest}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that must be alone last: each of them keeps the other lanes waiting."""
    items.sort(key=_must_be_alone)


def _must_be_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


def pytest_collection_finish() -> None:
    """The tests' tensors are small, and their ranks are threads: torch's own threads would only wait, and busily so.
    The modules and the collected tests are excluded from the garbage collection, each run of which took 0.3 s."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_step_left_over() -> Iterator[None]:
    """Close the step of this process after each test. One process runs many files of tests, in any order, and the step
    belongs to the process."""
    yield
    step, session = (sys.modules.get(f"farandole.training.state.{name}") for name in ("step", "session"))
    if step is not None and session is not None:
        step.close()
        step.on_decided(None)
        session.SESSION.close()


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Restore the environment after each test: init() and strict mode set variables of the process, for good."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True)
def _alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let no other test run beside one that is marked `alone`, also in other lanes (`make test`). It is for networks
    and deadlines that a busy machine would decide. The lock ends with its process."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    lock = Path(tmp_path_factory.getbasetemp().parent) / "alone.lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if _must_be_alone(request.node) else fcntl.LOCK_SH)
        yield
