"""Variables from an agent and a launcher to the workers of a job: where to report, and where to put files."""

from __future__ import annotations

import os
from collections.abc import Mapping

from msgspec import Struct, field

from farandole.config import JobConfig
from farandole.env.env_values import Amount, PositiveAmount, Seconds, WholeNumber, has_variables, read_variables

EXIT_NOTICE = "FARANDOLE_EXIT_NOTICE"


class WorkerEnv(Struct, frozen=True):
    """Settings from an agent to one worker.

    Attributes:
        agent_address: The address of the agent's local socket.
        worker: The name of the worker.
        secret: The secret that the worker sends to the agent.
        slot: The slot of the worker.
        data_host: The numeric address of this machine by which other workers reach it.
        scratch_folder: The folder that the agent removes with the job, also when this process is killed; empty: none.
        detection_budget_s: The detection budget of the job, in seconds.
        status_page: The path of the worker's status page; empty: none.
    """

    agent_address: str = field(name="FARANDOLE_AGENT")
    worker: str = field(name="FARANDOLE_WORKER")
    secret: str = field(name="FARANDOLE_SECRET")
    slot: WholeNumber = field(name="FARANDOLE_SLOT")
    data_host: str = field(name="FARANDOLE_DATA_HOST", default="127.0.0.1")
    scratch_folder: str = field(name="FARANDOLE_SCRATCH", default="")
    detection_budget_s: Seconds = field(name="FARANDOLE_DETECTION_BUDGET", default=JobConfig.detection_budget_s)
    status_page: str = field(name="FARANDOLE_PAGE", default="")


class JobEnv(Struct, frozen=True, omit_defaults=True):
    """Settings that all workers of a job share, from the launcher or, without one, from the user.

    Attributes:
        transport: The way in which tensors travel between workers: one of transport_choice.CHOICES, or an invalid word.
        sample_ledger: The folder in which workers record the samples that they train; empty: it was not requested.
    """

    transport: str = field(name="FARANDOLE_TRANSPORT", default="auto")
    sample_ledger: str = field(name="FARANDOLE_SAMPLE_LEDGER", default="")


def read_worker_env(environ: Mapping[str, str] = os.environ) -> WorkerEnv | None:
    """Return None when no agent started this process. Raises ConfigError when only some of the variables are set."""
    return read_variables(environ, WorkerEnv) if has_variables(environ, WorkerEnv) else None


def read_job_env(environ: Mapping[str, str] = os.environ) -> JobEnv:
    """Return the settings that all workers of the job share."""
    return read_variables(environ, JobEnv)


def read_transport() -> str:
    """Return the way in which tensors travel between workers."""
    return read_job_env().transport


def read_token(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the token from FARANDOLE_TOKEN for an agent that is to join a job; workers never inherit it."""
    return environ.get("FARANDOLE_TOKEN") or None


def read_exit_notice(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the agent may learn of this process's death before its memory is freed: unless
    FARANDOLE_EXIT_NOTICE is 0, off or false."""
    return environ.get(EXIT_NOTICE, "").lower() not in ("0", "off", "false")


# Checkpoint settings of a worker: from our launcher, or from the user where there is none of ours ---------------------


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
