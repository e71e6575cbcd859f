"""Numbers, amounts and switches from an environment, with errors that name the variable. Pure.

All raise ConfigError for a value that makes no sense. A variable that is empty counts as not set.
"""

from __future__ import annotations

from collections.abc import Mapping

from farandole.errors import ConfigError


def whole_number(environ: Mapping[str, str], name: str) -> int:
    """Return the whole number in a required variable."""
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(f"{name} must be a whole number, got {environ[name]!r}") from None


def amount(environ: Mapping[str, str], name: str, default: int) -> int:
    """Return a whole number that is not negative, or `default`."""
    number = whole_number(environ, name) if environ.get(name) else default
    if number < 0:
        raise ConfigError(f"{name} must not be negative, got {number}")
    return number


def seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    """Return a number of seconds, not negative and not infinite, or `default`."""
    text = environ.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{name} must be a number of seconds >= 0, got {text!r}")
    return value


def is_set(environ: Mapping[str, str], name: str) -> bool:
    """Return the value of a switch; False by default. Horovod reads numbers here; users also write words."""
    text = environ.get(name, "").strip().lower()
    if text in ("", "0", "false", "no", "off"):
        return False
    if text in ("1", "true", "yes", "on") or text.isdigit():
        return True
    raise ConfigError(f"{name} must be 0 or 1, got {environ[name]!r}")
