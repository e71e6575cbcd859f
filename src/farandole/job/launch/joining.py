"""The settings of a job for agents of other machines, and the token that they share.

It loads no asyncio: `--help` answers at once.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field
from pathlib import Path

from farandole.base.env import slurm_folder
from farandole.base.wire.authentication import checked_token, new_token
from farandole.base.wire.user_secret import may_others_read
from farandole.errors import ConfigError
from farandole.job.engines.host_list import HostSlots


@dataclass(frozen=True)
class Joining:
    """The way in which agents of other machines join: with the token in this file, or with the job file, which holds
    the coordinator's addresses, too. One of them may be missing."""

    token: bytes = field(repr=False)
    token_file: str
    job_file: Path | None = None


def joining(token_file: Path | None, job_file: Path | None, discovery_script: str | None) -> Joining | None:
    """Return the settings for joining agents. Creates the token file when it is missing. Raises ConfigError when that
    fails."""
    if token_file is None and job_file is None:
        return None
    if discovery_script is not None:
        flag = "--job-file" if token_file is None else "--token-file"
        raise ConfigError(f"{flag} and --host-discovery-script both determine the hosts; give one of them")
    if token_file is None:
        return Joining(new_token(), "", job_file)
    return Joining(token_of_job(token_file), str(token_file), job_file)


def state_job_file(options: argparse.Namespace) -> Path | None:
    """Return the job file of --state, checked together with the other options; None without --state. Raises
    ConfigError."""
    if options.state is None:
        if options.patience is not None:
            raise ConfigError("--patience needs --state DIR, with which another launcher may continue the job")
        return None
    if options.patience is not None and not 0 < options.patience < float("inf"):
        raise ConfigError(f"--patience must be a number of seconds > 0, got {options.patience:g}")
    if flag := source_of_hosts(options):
        raise ConfigError(
            f"--state cannot be combined with {flag}: the agents that this command starts end with it; start "
            "`farandole agent --job-file FILE` on the other machines"
        )
    if isinstance(options.state, str):
        if options.token_file is None:
            raise ConfigError(
                "--state etcd://... needs --token-file FILE: the job's token is not kept in etcd, and each machine on "
                "which the job may continue needs a copy of it"
            )
        return None
    folder: Path = options.state.absolute()
    return folder / "job" if options.job_file is None else None


def source_of_hosts(options: argparse.Namespace) -> str:
    """Return the given option that determines on which hosts agents are started; empty: none is given."""
    names = ("hosts", "hostfile", "host_discovery_script", "slurm")
    given = [name for name in names if getattr(options, name) not in (None, False)]
    return f"--{given[0].replace('_', '-')}" if given else ""


def slurm_job_file(job: str) -> Path:
    """Return the job file of a Slurm job unless the user has named another one."""
    return Path(slurm_folder()) / f"slurm-{job}.job"


def local_hosts(options: argparse.Namespace) -> tuple[HostSlots, ...]:
    """Return the hosts of --local-slots: this machine, or none."""
    if options.token_file is None and options.job_file is None:
        raise ConfigError(
            "--local-slots needs --token-file or --job-file: no agent of another machine could join without it"
        )
    if flag := source_of_hosts(options):
        raise ConfigError(f"--local-slots and {flag} both determine where workers run; give one of them")
    if options.local_slots < 0:
        raise ConfigError(f"--local-slots must not be negative, got {options.local_slots}")
    return (HostSlots("localhost", options.local_slots),) if options.local_slots else ()


def check_address(host: str, port: int, takes_agents: bool) -> None:
    """Check the address on which the coordinator will listen; empty: it is chosen. Raises ConfigError for an address
    that cannot be used, or was not clearly requested."""
    import ipaddress  # here, as below: `--help` answers at once

    try:
        address = None if host in ("", "localhost") else ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(f"--host needs a numeric address of this machine, got {host}") from None
    if address is not None and address.is_unspecified:
        raise ConfigError(f"--host {host}: give the address at which other machines reach this one")
    if address is not None and not address.is_loopback and not takes_agents:
        raise ConfigError(
            f"--host {host}: only a loopback address such as 127.0.0.1 is possible without hosts (--hosts) and "
            "without --token-file FILE or --job-file FILE, which let agents of other machines join"
        )
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port must be between 0 and 65535, got {port}")


# Encryption -----------------------------------------------------------------------------------------------------------

STORE_IS_PLAIN = (
    "--tls does not encrypt the store of torch.distributed, since torch's clients cannot: a script that calls "
    "init_process_group() sends names and addresses through it, and no tensors"
)


def tls_folder(folder: Path | None) -> str:
    """Return the absolute path of the folder of --tls; empty without one."""
    return "" if folder is None else os.path.abspath(folder)


def check_encryption(tls: str, transport: str) -> None:
    """Raise ConfigError for a transport whose connections --tls cannot encrypt."""
    if tls and transport == "nccl":
        raise ConfigError(
            f"--transport {transport} and --tls contradict each other: connections of {transport} cannot be encrypted; "
            "use --transport auto, or leave out --tls"
        )


# The job's token in a file, which its owner copies to the machines that may join --------------------------------------


def token_of_job(path: Path) -> bytes:
    """Return the token in the file, which is created, for this user only, when it is missing. Raises ConfigError as
    read_token does, and when the file cannot be created."""
    if not path.exists():
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return read_token_file(path)
        except OSError as error:
            raise ConfigError(f"the token file {path} cannot be created: {error.strerror}") from None
        with os.fdopen(descriptor, "w") as file:
            file.write(new_token().decode() + "\n")
    return read_token_file(path)


def read_token_file(path: Path) -> bytes:
    """Return the token in the file (also /dev/fd/3, for one that a parent passes). Raises ConfigError when it cannot be
    read, can be read by others, or is too short."""
    try:
        with path.open("rb") as file:
            may_read = may_others_read(file.fileno())
            text = file.read(4096)
    except OSError as error:
        raise ConfigError(f"the token file {path} cannot be read: {error.strerror}") from None
    if may_read:
        raise ConfigError(f"the token file {path} can be read by others: chmod 600 {path}")
    return checked_token(text, f"the token file {path}")
