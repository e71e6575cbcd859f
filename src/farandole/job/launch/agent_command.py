"""`farandole agent --join HOST:PORT`: runs workers of another machine's job on this one."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from farandole.base.command_parser import USAGE_ERROR, Parser
from farandole.base.config import Preemption, parse_preemption
from farandole.base.env import put_own_python_first, read_slurm_variables, read_token
from farandole.base.membership import Address
from farandole.base.wire.authentication import checked_token
from farandole.base.wire.encryption import load_certificates
from farandole.errors import ConfigError
from farandole.job.agent.agent import EndOfService, Service
from farandole.job.agent.host_resources import reserve_descriptors
from farandole.job.agent.network_addresses import own_addresses
from farandole.job.agent.preemption import Notice, watch_for_notices
from farandole.job.agent.remote_agent import CannotJoin, JoiningAgent, JoinOptions
from farandole.job.engines.host_list import HostSlots
from farandole.job.launch.ending_signals import ending_signals
from farandole.job.launch.job_files import JobFile, read_job_file
from farandole.job.launch.joining import read_token_file, tls_folder
from farandole.job.launch.report import Loudness, Report
from farandole.job.launch.run_parser import PREEMPTION_HELP, add_loudness
from farandole.registry import factory

CANNOT_JOIN = 1

_STANDARD_INPUT = Path("-")
_LONGEST_LINE = 4096


def agent_command(arguments: Sequence[str]) -> int:
    """Run the command and return the exit code. Raises SystemExit as argparse does."""
    parser = agent_parser()
    given = parser.parse_args(arguments)
    try:
        if not 0 <= given.left_exit_code <= 255:
            raise ConfigError(f"--left-exit-code must be between 0 and 255, got {given.left_exit_code}")
        preemption, options = parse_preemption(given.preemption), _options(given)
    except ConfigError as error:
        parser.error(str(error))
    report = Report(sys.stderr, Loudness[given.loudness])
    try:
        reserve_descriptors(options.slots)
        if given.token_file != _STANDARD_INPUT:  # an engine has set PATH; mpirun, or the user, may have given any
            put_own_python_first()
        service = serve(options, report, preemption, ends_with_input=given.token_file == _STANDARD_INPUT)
        return service.exit_code if service.end is EndOfService.JOB_ENDED else int(given.left_exit_code)
    except ConfigError as error:
        report.note(str(error))
        return USAGE_ERROR
    except CannotJoin as error:
        report.note(str(error))
        return CANNOT_JOIN
    finally:
        report.close()


def agent_parser() -> argparse.ArgumentParser:
    """Return the parser of its options."""
    parser = Parser(
        prog="farandole agent",
        usage="farandole agent --join HOST:PORT [--slots N] [--token-file FILE] [options]\n"
        "       farandole agent --job-file FILE [--slots N] [options]",
        description="Offer this machine's slots to a job of another machine, which was started with "
        "`farandole run --host ADDRESS --token-file FILE ...`. SIGTERM, SIGHUP or Ctrl-C: its workers "
        "leave at the next boundary, with nothing redone; SIGTERM or Ctrl-C twice: at once. In a job of Slurm SIGUSR1 "
        "and SIGUSR2 do as SIGTERM.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--join",
        metavar="HOST:PORT,...",
        help="address at which the job's coordinator listens; of several, the first one that answers is used",
    )
    where.add_argument(
        "--job-file",
        type=Path,
        metavar="FILE",
        help="the file of `farandole run --job-file FILE`, with addresses and token",
    )
    add("--slots", type=int, metavar="N", help="number of workers that this machine can run (default: 1)")
    add("--host", metavar="NAME", help="name of this machine in the job (default: its host name)")
    add(
        "--slurm",
        action="store_true",
        help="this machine is a node of a Slurm job of its own, which determines --slots and --host",
    )
    add(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="a copy of the job's token file, see `farandole run --token-file`; -: the first line of standard input, "
        "whose end then ends this agent (default: the token in FARANDOLE_TOKEN)",
    )
    add(
        "--tls",
        type=Path,
        metavar="DIR",
        help="a copy of the folder of `farandole run --tls DIR` (with --job-file default: that folder's path)",
    )
    add(
        "--retry",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds to try to join: at the start, and again after the job lost this agent (default: %(default)g)",
    )
    add(
        "--folder",
        metavar="DIR",
        help="working directory of the workers (default: the path of the job's working directory)",
    )
    add(
        "--grace",
        type=float,
        metavar="S",
        help="seconds that workers have to leave after SIGTERM (default: the value of the job)",
    )
    add(
        "--network-interfaces",
        metavar="NAME,...",
        help="network interfaces for the tensors of the workers (default: all are tried, first the one that leads to "
        "the coordinator)",
    )
    add(
        "--id",
        default="",
        metavar="TEXT",
        help="tells this agent from another one of a machine of the same name, such as the UID of a pod (default: the "
        "name is unique)",
    )
    add(
        "--left-exit-code",
        type=int,
        default=0,
        metavar="N",
        help="exit code when this machine has left the job before its end, for a system that starts the agent anew "
        "unless it ends with 0 (default: %(default)s)",
    )
    add("--preemption", default="none", metavar="CLOUD", help=PREEMPTION_HELP)
    add_loudness(parser, every_event="show every event")
    return parser


def _options(given: argparse.Namespace) -> JoinOptions:
    for flag, value in (("--retry", given.retry), ("--grace", given.grace)):
        if value is not None and not 0 <= value < float("inf"):
            raise ConfigError(f"{flag} must be a number of seconds >= 0, got {value}")
    slots, name = given.slots, given.host
    if given.slurm:
        if (node := read_slurm_variables()) is None:
            raise ConfigError("--slurm: this process belongs to no Slurm job (SLURM_JOB_ID is not set)")
        slots = factory("Slurm node's slots")(node) if slots is None else slots
        name = name or factory("Slurm node's name")(node)
    slots = 1 if slots is None else slots
    if slots < 1:
        raise ConfigError(f"--slots must be at least 1, got {slots}")
    host = HostSlots(name or os.uname().nodename, slots)
    tls, find = tls_folder(given.tls), None
    if given.job_file is not None:
        if given.token_file is not None:
            raise ConfigError("--job-file contains the token; leave out --token-file")
        file = read_job_file(given.job_file)
        addresses, token = file.addresses or (file.coordinator,), file.token
        tls = tls or file.tls
        find = _finder(given.job_file, file)
    else:
        found = [(text, Address.parse(text)) for text in given.join.split(",")]
        if wrong := [text for text, address in found if address is None]:
            raise ConfigError(f"--join needs HOST:PORT, as `farandole run` prints it, got {wrong[0]!r}")
        addresses, token = tuple(address for _, address in found if address is not None), _token(given)
    folder = None if given.folder is None else os.path.abspath(given.folder)
    if folder is not None and not (os.path.isdir(folder) and os.access(folder, os.X_OK)):
        # Detected before the job counts on this agent.
        raise ConfigError(
            f"--folder {given.folder}: the folder does not exist on this machine, or it cannot be entered"
        )
    interfaces = tuple(name for name in (given.network_interfaces or "").split(",") if name)
    if interfaces:
        own_addresses(interfaces)  # detected before the job counts on this agent
    if given.id and not (given.id.isascii() and given.id.isprintable() and " " not in given.id):
        raise ConfigError(f"--id must be printable ASCII without blanks, got {given.id!r}")
    return JoinOptions(
        addresses,
        token,
        host.name,
        host.slots,
        given.retry,
        folder,
        given.grace,
        interfaces,
        id=given.id,
        tls=load_certificates(tls),
        find=find,
    )


def _finder(path: Path, first: JobFile) -> Callable[[], tuple[Address, ...]]:
    """Return a function that reads the addresses in a job file again: another launcher may have taken the job over."""
    path, known = path.absolute(), first  # the agent enters the job's folder

    def find() -> tuple[Address, ...]:
        nonlocal known
        with contextlib.suppress(ConfigError):  # it is just being replaced, or the job has ended
            file = read_job_file(path)
            if file.job == first.job:
                known = file
        return known.addresses or (known.coordinator,)

    return find


def _token(given: argparse.Namespace) -> bytes:
    if given.token_file == _STANDARD_INPUT:
        # Without a buffer, nothing is taken from the stream but the line.
        with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stream:
            return checked_token(stream.readline(_LONGEST_LINE), "the first line of standard input")
    if given.token_file is not None:
        return read_token_file(given.token_file)
    if (text := read_token()) is not None:
        return checked_token(text.encode(), "FARANDOLE_TOKEN")
    raise ConfigError("the job's token is missing: give --token-file FILE, a copy of the token file of `farandole run`")


def serve(
    options: JoinOptions, report: Report, preemption: Preemption | None = None, ends_with_input: bool = False
) -> Service:
    """Serve as an agent, and return how that ended. Raises what JoiningAgent.run() raises. With `ends_with_input` the
    end of standard input means that the process is gone that has started this one."""

    async def run() -> Service:
        agent = JoiningAgent(options, report.on_event)

        def on_notice(notice: Notice) -> None:
            if notice.must_leave:
                agent.leave(notice.reason, within_s=notice.time_to_leave_s)

        def end(number: signal.Signals, is_urgent: bool) -> None:
            agent.leave(f"{number.name} was received", now=is_urgent)

        if ends_with_input:
            _on_end_of_input(agent.abandon)
        watch = asyncio.create_task(watch_for_notices(preemption or Preemption(), on_notice, report.on_event))
        try:
            with ending_signals(end):
                service = await agent.run()
        finally:
            watch.cancel()
            await asyncio.wait([watch])
        report.detail(f"{service.end.value}: {service.reason}")
        return service

    return asyncio.run(run())


def _on_end_of_input(call: Callable[[], None]) -> None:
    """Call it when standard input ends. Raises ConfigError when it is neither a pipe, a socket nor a terminal."""
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()

    def on_readable() -> None:
        if not os.read(descriptor, _LONGEST_LINE):
            loop.remove_reader(descriptor)
            call()

    try:
        loop.add_reader(descriptor, on_readable)
    except OSError:
        raise ConfigError("--token-file - needs a pipe as standard input, whose end ends this agent") from None
