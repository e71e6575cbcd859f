"""jsrun as a launcher: not in Farandole."""

from __future__ import annotations

from typing import NoReturn


def is_jsrun_installed() -> bool:
    """Return False: no process here is started through jsrun."""
    return False


def js_run(*_: object, **__: object) -> NoReturn:
    """Raise RuntimeError, whose message gives the alternative."""
    raise RuntimeError("Farandole starts workers itself and not through jsrun: leave out --jsrun")


generate_jsrun_rankfile = js_run
