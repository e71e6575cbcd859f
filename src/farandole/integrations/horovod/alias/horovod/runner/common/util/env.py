"""A process's rank from its environment, before any init()."""

from __future__ import annotations

from farandole.base.env import read_rank_and_size


def get_env_rank_and_size() -> tuple[int, int]:
    """Return (rank, size) from the launcher; (0, 1) without one. Raises RuntimeError when only one of them is set."""
    return read_rank_and_size()
