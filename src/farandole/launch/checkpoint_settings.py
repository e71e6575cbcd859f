"""The user's settings of checkpoints, checked. Used by arguments.py and run_function.py; it loads nothing heavy."""

from __future__ import annotations

from pathlib import Path

from farandole.checkpoint.schedule import parse_every
from farandole.checkpoint.store import normalized
from farandole.env import CheckpointEnv
from farandole.errors import ConfigError


def checkpoint_settings(place: str | Path | None, every: str, keep: int) -> CheckpointEnv | None:
    """Return the user's settings, checked; None for no checkpoints. Raises ConfigError."""
    parse_every(every)
    if keep < 1:
        raise ConfigError(f"--checkpoint-keep must be at least 1, got {keep}")
    return None if place is None else CheckpointEnv(normalized(str(place)), every, keep)
