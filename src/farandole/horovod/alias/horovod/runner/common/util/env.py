"""A process's rank from its environment, before any init()."""

from __future__ import annotations

from farandole.env import read_rank_and_size


def get_env_rank_and_size() -> tuple[int, int]:
    """(rank, size) as the launcher said; (0, 1) without one. Raises RuntimeError when it said only one of them."""
    return read_rank_and_size()
