"""A job as its user asked for it: each entry builds one JobSpec, which is passed whole from there on.

It loads no asyncio: `--help` answers at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from farandole.base.config import ForkServerUse, JobConfig, Preemption
from farandole.base.env import CheckpointEnv
from farandole.errors import ConfigError
from farandole.job.engines.host_list import Hosts, PodSelection, SshSettings
from farandole.job.launch.joining import Joining
from farandole.job.launch.page_address import PageOptions

if TYPE_CHECKING:
    from farandole.integrations.slurm.slurm_allocation import SlurmAllocation

PROGRESS = ("auto", "never", "always")
"""The values of --progress, the default first."""

PATIENCE_S = 10.0
"""Seconds for which agents wait for the next coordinator of a living launcher, which needs a fraction of one."""


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A job, checked as far as the arguments alone allow. Raises ConfigError for a value of `progress` that is none.

    config            its size, budgets and time limits: all of it that decisions about the membership need
    command           the command of the workers. An empty first word stands for the Python of each agent
    environment       variables of the workers in addition to those of this process
    hosts             where workers run, in the order of their ranks: each name is a host of its own; or the script that
                      prints them. None: this machine, with as many slots as the job may ever need
    order_of_hosts    all hosts that agents may offer, with their slots, in the order of their ranks; None: any may
                      join, in any order
    joining           the other agents that may offer slots; given when config.takes_agents
    ssh               how hosts are reached that are other machines
    slurm             the allocation whose nodes run the workers; None: they do not
    requeues          whether the Slurm job is put back into the queue when its end is announced
    pods              the pods from which agents join; None: pods are not watched
    remote_folder     the working directory of workers on other machines; empty: the path of this process's own
    interfaces        the network interfaces between the hosts; empty: those that lead to the other hosts
    host, port        the address of the coordinator. Empty: loopback, or where hosts are other machines the addresses
                      at which they may reach it; port 0 lets the system choose
    preemption        where preemption notices are looked for, on this machine and by the agents that are started on
                      others. One of this machine ends the job as SIGTERM does: the coordinator goes with the machine,
                      and a checkpoint is still possible
    fork_server       whether workers may be forked by a process that has imported torch. While it makes one, this
                      process becomes the parent of its descendants' orphans
    checkpoint        where and how often the state is written; None: nowhere
    state             the folder, or the URL of etcd, in which the job outlives its launcher; None: it does not
    patience_s        how long agents of other machines keep their workers when they have no coordinator
    output_directory  also gets the output of the workers, by rank; prefix_timestamp: the time precedes each line
    error_folder      the folder for the workers' error files on this machine; empty: they are removed with the job
    events            the file to which every event is appended, as JSON
    timeline          the file of named operations, which gets the generations, too; None: there is none
    page              the live page, and the collector of its traces; None: there is none
    loudness          the name of a report.Loudness
    progress          whether there is a line about the job below its output: one of PROGRESS
    notes             for the user: the given options that have no effect, one sentence each
    """

    config: JobConfig
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    hosts: Hosts = None
    order_of_hosts: Mapping[str, int] | None = None
    joining: Joining | None = None
    ssh: SshSettings = field(default_factory=SshSettings)
    slurm: SlurmAllocation | None = None
    requeues: bool = False
    pods: PodSelection | None = None
    remote_folder: str = ""
    interfaces: tuple[str, ...] = ()
    host: str = ""
    port: int = 0
    preemption: Preemption = field(default_factory=Preemption)
    fork_server: ForkServerUse = "off"
    checkpoint: CheckpointEnv | None = None
    state: Path | str | None = None
    patience_s: float = PATIENCE_S
    output_directory: Path | None = None
    prefix_timestamp: bool = False
    error_folder: str = ""
    events: Path | None = None
    timeline: Path | None = None
    page: PageOptions | None = None
    loudness: str = "NORMAL"
    progress: str = PROGRESS[0]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.progress not in PROGRESS:
            raise ConfigError(f"progress must be one of {', '.join(map(repr, PROGRESS))}, got {self.progress!r}")
