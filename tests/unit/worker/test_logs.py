"""HOROVOD_LOG_LEVEL."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from farandole.training.worker.process_setup import set_log_level


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    ours = logging.getLogger("farandole")
    level, handlers, propagate = ours.level, ours.handlers[:], ours.propagate
    yield ours
    ours.setLevel(level)
    ours.handlers[:], ours.propagate = handlers, propagate


def test_what_is_less_important_than_asked_is_not_said(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    set_log_level("error")
    logger.warning("not this")
    set_log_level("info")
    logger.info("but this")
    assert [record.message for record in caplog.records] == ["but this"]


def test_without_any_logging_of_the_scripts_own_it_is_said_on_stderr(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logger.propagate = False  # pytest listens above it
    set_log_level("debug")
    logger.debug("a detail")
    assert capsys.readouterr().err == "[DEBUG] farandole: a detail\n"
