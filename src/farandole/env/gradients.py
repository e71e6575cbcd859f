"""The user's settings of the gradients' reduction for the workers."""

from __future__ import annotations

import os
from collections.abc import Mapping

BUCKET_MB = "FARANDOLE_BUCKET_MB"


def read_bucket_mb(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the least size of a bucket of gradients, in megabytes, as it was written; None: it is chosen
    automatically."""
    return environ.get(BUCKET_MB) or None
