"""The test whether the user has configured this process's memory allocation."""

from __future__ import annotations

import os
from collections.abc import Mapping

_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def has_malloc_settings(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a setting of the C library's malloc is in the environment."""
    return any(name in environ for name in _SETTINGS) or "glibc.malloc." in environ.get("GLIBC_TUNABLES", "")
