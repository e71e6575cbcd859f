"""`farandole doctor`: look at this machine, and by ssh at the hosts of a job, before a job runs there."""

from __future__ import annotations

import argparse
import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from farandole.base.command_parser import USAGE_ERROR, Parser
from farandole.base.config import MOST_WORKERS
from farandole.base.membership import Address
from farandole.errors import ConfigError
from farandole.job.agent.network_addresses import addresses_for
from farandole.job.engines.host_list import HostSlots, SshSettings, is_this_machine, parse_hostfile, parse_hosts
from farandole.job.engines.ssh_engine import ssh_command
from farandole.job.launch.machine_check import Examined, Finding, examine

_FINE, _TROUBLE = 0, 1
_HOST_S = 180.0
_AT_ONCE = 32


def doctor_command(arguments: Sequence[str]) -> int:
    """Run the command. Return 0, or 1 if a job could not run; USAGE_ERROR for wrong options."""
    try:
        options = doctor_parser().parse_args(arguments)
        hosts = _hosts(options)
    except ConfigError as error:
        print(f"farandole doctor: {error}", file=sys.stderr)
        return USAGE_ERROR
    if options.towards is not None:  # asked by the doctor of another machine
        towards = msgspec.json.decode(options.towards, type=list[Address])
        print(msgspec.json.encode(examine(options.workers, towards)).decode())
        return _FINE
    settings = SshSettings(options.ssh_port, options.ssh_identity_file or "", options.remote_python or "")
    here = sum(each.slots for each in hosts if is_this_machine(each.name)) or (1 if hosts else options.workers)
    others = [each for each in hosts if not is_this_machine(each.name)]
    found = [examine(here)]
    if others:
        with (
            _listening(addresses_for([each.name for each in others]), len(others)) as addresses,
            ThreadPoolExecutor(_AT_ONCE) as all_,
        ):
            found += all_.map(lambda host: _ask(host, settings, addresses, found[0]), others)
    if options.json:
        print(msgspec.json.encode(found).decode())
    else:
        print("\n".join(line for each in found for line in format_examined(each)))
    return _TROUBLE if any(finding.state == "error" for each in found for finding in each.findings) else _FINE


def doctor_parser() -> argparse.ArgumentParser:
    """Return the parser of its options."""
    parser = Parser(
        prog="farandole doctor",
        description="Look at this machine, and by ssh at the hosts of a job: versions, devices, cores, memory, limits, "
        "network. Nothing is changed. The exit code is 1 if a job could not run.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-np", "--num-proc", type=int, default=1, dest="workers", metavar="N", help="workers here (default: 1)")
    add("-H", "--hosts", metavar="HOST:SLOTS,...", help="the hosts of the job, each with its number of slots")
    add("-hostfile", "--hostfile", type=Path, metavar="FILE", help="lines such as: host slots=2")
    add("-p", "--ssh-port", type=int, metavar="PORT", help="port of their ssh servers (default: that of ssh_config)")
    add("-i", "--ssh-identity-file", metavar="FILE", help="private key (default: those of ssh_config)")
    add("--remote-python", metavar="PATH", help="the interpreter with Farandole there (default: the path of this one)")
    add("--json", action="store_true", help="print everything as JSON")
    add("--towards", help=argparse.SUPPRESS)
    return parser


def _hosts(options: argparse.Namespace) -> tuple[HostSlots, ...]:
    if options.hosts and options.hostfile:
        raise ConfigError("give --hosts or --hostfile, not both")
    if not 0 < options.workers <= MOST_WORKERS:
        raise ConfigError(f"-np must be between 1 and {MOST_WORKERS}, got {options.workers}")
    if options.hostfile:
        return parse_hostfile(options.hostfile)
    return parse_hosts(options.hosts) if options.hosts else ()


# Other hosts ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _listening(hosts: Sequence[str], backlog: int) -> Iterator[list[Address]]:
    """Listen on addresses of this machine, as a coordinator would. The kernel establishes connections by itself, up to
    `backlog` of them."""
    with contextlib.ExitStack() as stack:
        addresses = []
        for host in hosts:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = stack.enter_context(socket.create_server((host, 0), family=family, backlog=backlog))
            addresses.append(Address(host, listener.getsockname()[1]))
        yield addresses


def _ask(host: HostSlots, settings: SshSettings, towards: Sequence[Address], own: Examined) -> Examined:
    """Have the host look at itself, and compare it with this machine."""
    arguments = ["doctor", "-np", str(host.slots), "--towards", msgspec.json.encode(towards).decode()]
    command = ssh_command(settings, host.name, arguments)
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_HOST_S)
        answer = msgspec.json.decode(done.stdout.splitlines()[-1] if done.stdout else "", type=Examined)
    except subprocess.TimeoutExpired:
        reason = f"no answer within {_HOST_S:g} s"
    except OSError as error:
        reason = str(error)
    except msgspec.MsgspecError:
        reason = "; ".join(done.stderr.strip().splitlines()[-2:]) or f"exit code {done.returncode} without an answer"
    else:
        compared = [same_versions(own.versions, answer.versions), reaches(towards, answer.reached)]
        return msgspec.structs.replace(answer, host=host.name, findings=[*answer.findings, *compared])
    return Examined(host.name, {}, [unanswered(host.name, reason)], [])


def unanswered(host: str, reason: str) -> Finding:
    """Return the finding for a host that could not be looked at."""
    advice = f"`ssh {host} true` must work without a password, and Farandole be installed there (--remote-python PATH)"
    return Finding("ssh", "error", reason, advice)


def same_versions(ours: dict[str, str], theirs: dict[str, str]) -> Finding:
    """Compare the versions of two machines."""
    differing = [
        f"{name} {theirs.get(name) or 'missing'} instead of {version}"
        for name, version in ours.items()
        if theirs.get(name) != version
    ]
    if differing:
        advice = "install the same versions on all hosts of a job: an agent with others is refused"
        return Finding("versions", "error", ", ".join(differing), advice)
    return Finding("versions", "ok", "the same as here: " + ", ".join(f"{name} {ours[name]}" for name in ours))


def reaches(wanted: Sequence[Address], reached: Sequence[Address]) -> Finding:
    """Judge at which addresses of this machine the other one reaches it."""
    names = ", ".join(str(each) for each in reached)
    if not wanted:
        return Finding("network", "error", "this machine has no address for others", "connect it to their network")
    if not reached:
        tried = ", ".join(str(each) for each in wanted)
        advice = "open the ports of this machine for that host, or select a network with --network-interfaces"
        return Finding("network", "error", f"it reaches this machine at none of {tried}", advice)
    return Finding("network", "ok", f"it reaches this machine at {names}")


# The report -----------------------------------------------------------------------------------------------------------


def format_examined(examined: Examined) -> list[str]:
    """Return the report of one machine as lines of text."""
    width = max(len(each.topic) for each in examined.findings)
    lines = [examined.host]
    for each in examined.findings:
        lines.append(f"  {each.state:<7}  {each.topic:<{width}}  {each.text}")
        if each.advice:
            lines.append(f"  {'':<7}  {'':<{width}}  -> {each.advice}")
    return lines
