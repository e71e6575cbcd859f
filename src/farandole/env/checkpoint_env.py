"""Checkpoint settings of a worker: from our launcher, or from the user where there is none of ours."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from farandole.env.env_values import amount
from farandole.errors import ConfigError


@dataclass(frozen=True)
class CheckpointEnv:
    """The checkpoints of a job.

    folder   their folder, or an address
    every    their interval: the text of --checkpoint-every
    keep     the number of checkpoints to keep
    resume   name of the newest one when the job began; empty: it began at the beginning
    run_id   the run id with which the job began; 0: no process has locked the place yet
    owner    the process that has locked it
    """

    folder: str
    every: str = "10m"
    keep: int = 2
    resume: str = ""
    run_id: int = 0
    owner: str = ""


def checkpoint_environment(settings: CheckpointEnv) -> dict[str, str]:
    """Return the variables that read_checkpoint_env() reads."""
    return {
        "FARANDOLE_CHECKPOINT": settings.folder,
        "FARANDOLE_CHECKPOINT_EVERY": settings.every,
        "FARANDOLE_CHECKPOINT_KEEP": str(settings.keep),
        "FARANDOLE_CHECKPOINT_RESUME": settings.resume,
        "FARANDOLE_CHECKPOINT_RUN_ID": str(settings.run_id),
        "FARANDOLE_CHECKPOINT_OWNER": settings.owner,
    }


def read_checkpoint_env(environ: Mapping[str, str] = os.environ) -> CheckpointEnv | None:
    """Return None when the job writes no checkpoints. Raises ConfigError for numbers that make no sense."""
    if not environ.get("FARANDOLE_CHECKPOINT"):
        return None
    default = CheckpointEnv(environ["FARANDOLE_CHECKPOINT"])
    keep = amount(environ, "FARANDOLE_CHECKPOINT_KEEP", default.keep)
    if keep < 1:
        raise ConfigError(f"FARANDOLE_CHECKPOINT_KEEP must be at least 1, got {keep}")
    return CheckpointEnv(
        folder=default.folder,
        every=environ.get("FARANDOLE_CHECKPOINT_EVERY") or default.every,
        keep=keep,
        resume=environ.get("FARANDOLE_CHECKPOINT_RESUME", ""),
        run_id=amount(environ, "FARANDOLE_CHECKPOINT_RUN_ID", 0),
        owner=environ.get("FARANDOLE_CHECKPOINT_OWNER", ""),
    )
