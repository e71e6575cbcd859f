"""The folder in which this user's running programs keep small private files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def read_runtime_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for the files of this user's jobs, which may not exist yet: $XDG_RUNTIME_DIR/farandole, or
    /tmp/farandole-UID where there is no such variable (in containers, under ssh without a session)."""
    given = environ.get("XDG_RUNTIME_DIR", "")
    return Path(given) / "farandole" if given.startswith("/") else Path(f"/tmp/farandole-{os.geteuid()}")
