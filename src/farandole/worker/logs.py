"""HOROVOD_LOG_LEVEL: how much of what Farandole does in this process is said."""

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
    """Have the logger `farandole` say what is at least of this level ("trace", "debug", "info", "warning", "error",
    "fatal"): where the script has set up logging there, else on stderr."""
    logger = logging.getLogger("farandole")
    logger.setLevel(_LEVELS[level])
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(levelname)s] %(name)s: %(message)s"))
        logger.addHandler(handler)
