"""The log level of this process, from HOROVOD_LOG_LEVEL."""

from __future__ import annotations

import logging

_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}


def say_from(level: str) -> None:
    """Set the level of the logger `farandole` ("trace", "debug", "info", "warning", "error", "fatal"). Its output goes
    where the script has set up logging, else to stderr."""
    logger = logging.getLogger("farandole")
    logger.setLevel(_LEVELS[level])
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(levelname)s] %(name)s: %(message)s"))
        logger.addHandler(handler)
