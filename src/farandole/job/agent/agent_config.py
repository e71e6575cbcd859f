"""The configuration of an agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from farandole.base.config import ForkServerUse
from farandole.base.membership import Address
from farandole.base.wire.encryption import Certificates


@dataclass(frozen=True)
class AgentConfig:
    """One agent, and what its workers get.

    slots               workers for which this host has capacity
    command             the command of each worker
    environment         the base of a worker's environment; the agent adds the variables of init()
    is_elastic          workers may come and go without ending the job, and are told so as in Horovod
    detection_budget_s  how long a worker may be stopped, and the coordinator silent; the agent sends ten heartbeats in
                        it
    grace_s             from SIGTERM to SIGKILL when the job ends, or this agent is asked to
    is_apart            the agent is not part of the coordinator's process: it can lose it, and be replaced meanwhile
    heartbeat_id, heartbeat_port  of its heartbeats as datagrams; 0: there are none
    fork_server         whether workers may be forked by a process that has imported torch
    store_port          of the job's store, at the address of the coordinator; 0: there is none
    max_restarts        how often all workers may be started again, for scripts that read it
    error_folder        the folder for the workers' error files, which stay after the job; empty: they are removed
    data_hosts          the addresses of this machine for the other workers; empty: that from which this agent reaches
                        the coordinator, and the others that are not loopback unless that is
    process             the identifier of this process in AgentHello
    tls                 the job's certificates, with which its TCP connections are encrypted; None: they are not
    patience_s          how long its workers continue when the connection to the coordinator has ended, until there is
                        another one; 0: not at all
    outlives_silence    a coordinator that is silent for the budget counts as such an end: another one may take over
    """

    name: str
    host: str
    slots: int
    coordinator: Address
    job_id: str
    token: bytes = field(repr=False)
    command: Sequence[str]
    environment: Mapping[str, str] = field(repr=False)
    detection_budget_s: float
    grace_s: float
    is_elastic: bool = False
    is_apart: bool = False
    heartbeat_id: bytes = field(default=b"", repr=False)
    heartbeat_port: int = 0
    fork_server: ForkServerUse = "off"
    store_port: int = 0
    max_restarts: int = 0
    error_folder: str = ""
    data_hosts: tuple[str, ...] = ()
    process: str = ""
    patience_s: float = 0.0
    outlives_silence: bool = False
    tls: Certificates | None = field(default=None, repr=False)
