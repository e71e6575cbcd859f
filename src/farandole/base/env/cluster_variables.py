"""Variables of Slurm, about the allocation of a job and one node's part in it, and of etcdctl."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping

from msgspec import Struct, field

from farandole.base.env.agent_env import Amount, read_variables
from farandole.errors import ConfigError


class SlurmVariables(Struct, frozen=True):
    """The variables of sbatch, salloc and srun that tell about the allocation (their man pages, OUTPUT ENVIRONMENT
    VARIABLES).

    Attributes:
        job: The number of the Slurm job.
        node_list: Its nodes, as Slurm writes them: "node[1-3,7]".
        tasks: The number of tasks, if it was given.
        tasks_per_node: The tasks of each node: "2(x3),1". Where their number was not given: as many as it has CPUs.
        asked_tasks_per_node: --ntasks-per-node, if it was given.
        gpus_per_node: --gpus-per-node, if it was given: "4" or "a100:4".
        gpus_here: The number of GPUs on this node.
        node: The name of this node.
        array_job, array_task: The job and the task of an array, where this job belongs to one.
        step_tasks: The number of tasks of this step; a batch script has none.
        parts: The number of components of a heterogeneous job.
    """

    job: str = field(name="SLURM_JOB_ID", default="")
    node_list: str = field(name="SLURM_JOB_NODELIST", default="")
    tasks: Amount = field(name="SLURM_NTASKS", default=0)
    tasks_per_node: str = field(name="SLURM_TASKS_PER_NODE", default="")
    asked_tasks_per_node: Amount = field(name="SLURM_NTASKS_PER_NODE", default=0)
    gpus_per_node: str = field(name="SLURM_GPUS_PER_NODE", default="")
    gpus_here: Amount = field(name="SLURM_GPUS_ON_NODE", default=0)
    node: str = field(name="SLURMD_NODENAME", default="")
    array_job: str = field(name="SLURM_ARRAY_JOB_ID", default="")
    array_task: str = field(name="SLURM_ARRAY_TASK_ID", default="")
    step_tasks: Amount = field(name="SLURM_STEP_NUM_TASKS", default=0)
    parts: Amount = field(name="SLURM_HET_SIZE", default=0)


def read_slurm_variables(environ: Mapping[str, str] = os.environ) -> SlurmVariables | None:
    """Return the variables; None outside of a Slurm job. Raises ConfigError for a value that makes no sense."""
    return read_variables(environ, SlurmVariables) if environ.get("SLURM_JOB_ID") else None


def is_under_slurm(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process belongs to a job of Slurm."""
    return bool(environ.get("SLURM_JOB_ID"))


def slurm_client_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for Slurm's commands, without the variables that srun reads as options (srun(1), INPUT
    ENVIRONMENT VARIABLES): they describe what the user's job asked for, not a step of one agent."""
    return {name: value for name, value in environ.items() if name == "SLURM_CONF" or not name.startswith("SLURM_")}


def each_node(counts: str, name: str) -> list[int]:
    """Return the number for each node, from "2(x3),1". Raises ConfigError that names the variable."""
    found: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(f"{name} must be a whole number, or a list such as 2(x3),1, got {counts!r}")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def slurm_folder() -> str:
    """Return the folder for the job files of this user's Slurm jobs, in the home folder, which all nodes share."""
    return os.path.join(os.path.expanduser("~"), ".farandole")


# etcd: how the launcher of a job is let into it (integrations/etcd/etcd_client.py) ------------------------------------


class EtcdVariables(Struct, frozen=True):
    """The variables of etcdctl (https://github.com/etcd-io/etcd/tree/release-3.4/etcdctl) for its identity.

    Attributes:
        user: The name, or NAME:PASSWORD; empty: etcd asks for none.
        password: Of that user, where `user` has none.
        authority: The file with the certificate of the authority of etcd's servers; empty: connections are plain.
        certificate, key: The files with the client's certificate and its key; empty: it has none.
    """

    user: str = field(name="ETCDCTL_USER", default="")
    password: str = field(name="ETCDCTL_PASSWORD", default="")
    authority: str = field(name="ETCDCTL_CACERT", default="")
    certificate: str = field(name="ETCDCTL_CERT", default="")
    key: str = field(name="ETCDCTL_KEY", default="")


def take_etcd_variables(environ: MutableMapping[str, str] = os.environ) -> EtcdVariables:
    """Return the variables, and remove user and password from the environment: no worker needs them."""
    found = read_variables(environ, EtcdVariables)
    for name in ("ETCDCTL_USER", "ETCDCTL_PASSWORD"):
        environ.pop(name, None)
    return found
