"""Checkpoint settings of a worker: from our launcher, or from the user where there is none of ours."""

from __future__ import annotations

import os
from collections.abc import Mapping

from msgspec import Struct, field

from farandole.env.env_values import Amount, PositiveAmount, has_variables, read_variables


class CheckpointEnv(Struct, frozen=True):
    """The checkpoints of a job.

    Attributes:
        folder: Their folder, or an address.
        every: Their interval: the text of --checkpoint-every.
        keep: The number of checkpoints to keep.
        resume: The name of the newest one when the job began; empty: it began at the beginning.
        run_id: The run id with which the job began; 0: no process has locked the place yet.
        owner: The process that has locked it.
    """

    folder: str = field(name="FARANDOLE_CHECKPOINT")
    every: str = field(name="FARANDOLE_CHECKPOINT_EVERY", default="10m")
    keep: PositiveAmount = field(name="FARANDOLE_CHECKPOINT_KEEP", default=2)
    resume: str = field(name="FARANDOLE_CHECKPOINT_RESUME", default="")
    run_id: Amount = field(name="FARANDOLE_CHECKPOINT_RUN_ID", default=0)
    owner: str = field(name="FARANDOLE_CHECKPOINT_OWNER", default="")


def read_checkpoint_env(environ: Mapping[str, str] = os.environ) -> CheckpointEnv | None:
    """Return None when the job writes no checkpoints. Raises ConfigError for numbers that make no sense."""
    return read_variables(environ, CheckpointEnv) if has_variables(environ, CheckpointEnv) else None
