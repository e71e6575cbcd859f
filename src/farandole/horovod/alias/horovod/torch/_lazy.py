"""Names that are loaded from their home when first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def names(module: str, homes: dict[str, tuple[str, ...]]) -> tuple[Callable[[str], Any], list[str]]:
    """A module's `__getattr__` and `__all__`."""
    home_of = {name: home for home, listed in homes.items() for name in listed}

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home_of[name]), name)

    return get, sorted(home_of)
