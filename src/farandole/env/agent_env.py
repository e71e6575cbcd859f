"""Variables from an agent to the worker that it starts: where to report, and where to put files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from farandole.config import JobConfig
from farandole.env.env_values import seconds, whole_number
from farandole.errors import ConfigError

EXIT_NOTICE = "FARANDOLE_EXIT_NOTICE"


@dataclass(frozen=True)
class WorkerEnv:
    """Settings from an agent to a worker: the agent's address, the worker's name and secret, its slot, and the numeric
    address of this machine by which other workers reach it."""

    agent_address: str
    worker: str
    secret: str
    slot: int
    data_host: str = "127.0.0.1"


def worker_environment(
    agent_address: str, worker: str, secret: str, slot: int, data_host: str = "127.0.0.1"
) -> dict[str, str]:
    """Return the variables that read_worker_env() reads."""
    return {
        "FARANDOLE_AGENT": agent_address,
        "FARANDOLE_WORKER": worker,
        "FARANDOLE_SECRET": secret,
        "FARANDOLE_SLOT": str(slot),
        "FARANDOLE_DATA_HOST": data_host,
    }


def read_worker_env(environ: Mapping[str, str] = os.environ) -> WorkerEnv | None:
    """Return None when no agent started this process. Raises ConfigError when only some of the variables are set."""
    names = ("FARANDOLE_AGENT", "FARANDOLE_WORKER", "FARANDOLE_SECRET", "FARANDOLE_SLOT")
    missing = [name for name in names if name not in environ]
    if len(missing) == len(names):
        return None
    if missing:
        raise ConfigError(f"the environment has some FARANDOLE_ variables but lacks {', '.join(missing)}")
    address, worker, secret, _ = (environ[name] for name in names)
    data_host = environ.get("FARANDOLE_DATA_HOST", WorkerEnv.data_host)
    return WorkerEnv(address, worker, secret, whole_number(environ, "FARANDOLE_SLOT"), data_host)


def read_token(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the token from FARANDOLE_TOKEN for an agent that is to join a job; workers never inherit it."""
    return environ.get("FARANDOLE_TOKEN") or None


def scratch_environment(folder: str) -> dict[str, str]:
    """Return the variable that read_scratch_folder() reads."""
    return {"FARANDOLE_SCRATCH": folder}


def read_scratch_folder(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the folder that the agent removes with the job, also when this process is killed; None without an
    agent."""
    return environ.get("FARANDOLE_SCRATCH")


def budget_environment(budget_s: float) -> dict[str, str]:
    """Return the variable that read_detection_budget_s() reads."""
    return {"FARANDOLE_DETECTION_BUDGET": f"{budget_s:g}"}


def read_detection_budget_s(environ: Mapping[str, str] = os.environ) -> float:
    """Return the detection budget of this job, in seconds."""
    return seconds(environ, "FARANDOLE_DETECTION_BUDGET", JobConfig.detection_budget_s)


def page_environment(path: str) -> dict[str, str]:
    """Return the variable that read_page() reads."""
    return {"FARANDOLE_PAGE": path} if path else {}


def read_page(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the path of this worker's status page; None if there is none."""
    return environ.get("FARANDOLE_PAGE") or None


def read_exit_notice(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the agent may learn of this process's death before its memory is freed: unless
    FARANDOLE_EXIT_NOTICE is 0, off or false."""
    return environ.get(EXIT_NOTICE, "").lower() not in ("0", "off", "false")


def sample_ledger_environment(folder: str) -> dict[str, str]:
    """Return the variable that read_sample_ledger() reads."""
    return {"FARANDOLE_SAMPLE_LEDGER": folder}


def read_sample_ledger(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the folder in which workers record the samples that they train; None if it was not requested."""
    return environ.get("FARANDOLE_SAMPLE_LEDGER") or None


def transport_environment(transport: str) -> dict[str, str]:
    """Return the variable that read_transport() reads."""
    return {"FARANDOLE_TRANSPORT": transport}


def read_transport(environ: Mapping[str, str] = os.environ) -> str:
    """Return the way in which tensors travel between workers: one of transport_choice.CHOICES, or an invalid word."""
    return environ.get("FARANDOLE_TRANSPORT") or "auto"
