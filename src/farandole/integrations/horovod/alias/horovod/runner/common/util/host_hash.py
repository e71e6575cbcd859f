"""A name for this machine on which two processes agree if they share its memory."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path

_NAMESPACES = Path("/proc/self/ns")


def host_hash(salt: str | None = None) -> str:
    """Return the host's short name and a digest of its full name, its Linux namespaces and `salt`."""
    full = socket.gethostname()
    namespaces = sorted(str(each.readlink()) for each in _NAMESPACES.iterdir()) if _NAMESPACES.exists() else []
    words = [full, *namespaces, *([salt] if salt else [])]
    return f"{full.partition('.')[0]}-{_hash(' '.join(words))}"


def _hash(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
