"""`farandole torchrun script.py`: torchrun's command line, for jobs of Farandole."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from farandole.base.command_parser import USAGE_ERROR
from farandole.base.env import read_token
from farandole.base.wire.authentication import checked_token
from farandole.errors import ConfigError
from farandole.integrations.torchrun.torchrun_options import Node, TorchrunOptions, parse_torchrun
from farandole.job.launch.joining import Joining, read_token_file

if TYPE_CHECKING:
    from farandole.job.coordinator.coordinator_factory import CoordinatorFactory
    from farandole.job.launch.report import Report

FAILED = 1  # torchrun's exit code for the failure of a worker, whatever that worker's was
_INTERRUPTED = 130  # a shell's code for SIGINT


def torchrun_command(arguments: Sequence[str]) -> int:
    """Run the job and return the exit code: 0, 1 for a failure, 130 for a job that was stopped. Raises SystemExit as
    argparse does."""
    options = parse_torchrun(arguments)
    if options.node is not None and options.node.is_first is False:
        return _reported(options, None)
    from farandole.job.coordinator.coordinator_factory import forked_factory

    with forked_factory() as factory:  # before there are threads
        return _reported(options, factory)


def _reported(options: TorchrunOptions, factory: CoordinatorFactory | None) -> int:
    from farandole.job.launch.launcher import reporting

    with reporting(options.job) as report:
        try:
            return _run_or_join(options, report, factory)
        except KeyboardInterrupt:
            return _INTERRUPTED
        except ConfigError as error:
            report.note(str(error))
            return USAGE_ERROR


def _run_or_join(options: TorchrunOptions, report: Report, factory: CoordinatorFactory | None) -> int:
    node = options.node
    if node is None:
        return _run(options, report, factory)
    if not _runs_coordinator(node):
        return _join(options, node, report)
    try:
        return _run(options, report, factory)
    except ConfigError as error:
        # Of several nodes on one machine that began at the same time, the others have found the address free, too.
        cause = error.__cause__
        if node.is_first is None and isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE:
            return _join(options, node, report)
        raise


def _run(options: TorchrunOptions, report: Report, factory: CoordinatorFactory | None) -> int:
    from farandole.integrations.torchrun.torchrun_output import FailureReport, Places, TorchrunOutput, run_folder
    from farandole.job.coordinator.shutdown import STOPPED_EXIT_CODE
    from farandole.job.launch.job_runner import Additions
    from farandole.job.launch.launcher import launch

    folder = run_folder(options)
    if folder is not None and options.log_dir is None:
        report.note(f"the logs are in {folder}")
    spec = replace(options.job, error_folder="" if folder is None else str(folder))
    if (node := options.node) is not None:
        order = _order_of_hosts(options, node)
        spec = replace(spec, host=_numeric(node.host), port=node.port, joining=_joining(node), order_of_hosts=order)
    places, failures = Places(), FailureReport()
    additions = Additions(
        make_sink=lambda _, line: TorchrunOutput(options, folder, places, line),
        listeners=(places.on_event, failures.on_event),
        factory=factory,
    )
    outcome = launch(spec, report, additions)
    code = outcome.exit_code if outcome.exit_code in (0, STOPPED_EXIT_CODE) else FAILED
    if code == FAILED and (text := failures.text(options.name)):
        report.note(text)
    report.ended(code, outcome.reason)
    return code


# Several nodes: the first one runs the coordinator, and the others join as `farandole agent --join` does --------------


def _order_of_hosts(options: TorchrunOptions, node: Node) -> dict[str, int] | None:
    """Return the hosts with their slots in the order of their ranks; None where the order of joining counts."""
    if node.rank is None:
        return None
    others = {_name_of_node(rank): options.workers for rank in range(1, options.nodes)}
    return {"localhost": options.workers, **others}


def _name_of_node(rank: int) -> str:
    return f"node{rank}"


def _runs_coordinator(node: Node) -> bool:
    """Return whether this node is the first one: as it was said, or because the address is one of this machine's, where
    no other process listens."""
    if node.is_first is not None:
        return node.is_first
    address = _numeric(node.host)
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, node.port))
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
                return False
            raise ConfigError(f"{node.host}:{node.port} cannot be used: {error.strerror}") from None
    return True


def _numeric(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"{host}: its address cannot be found ({error.strerror})") from None


def _joining(node: Node) -> Joining:
    where = "FARANDOLE_TOKEN" if node.token_file is None else str(node.token_file)
    return Joining(_token(node), where)


def _token(node: Node) -> bytes:
    if node.token_file is not None:
        return read_token_file(node.token_file)
    return checked_token((read_token() or "").encode(), "FARANDOLE_TOKEN")


def _join(options: TorchrunOptions, node: Node, report: Report) -> int:
    from farandole.base.membership import Address
    from farandole.base.wire.encryption import load_certificates
    from farandole.job.agent.host_resources import reserve_descriptors
    from farandole.job.agent.remote_agent import CannotJoin, JoinOptions
    from farandole.job.launch.agent_command import serve

    name = f"{os.uname().nodename}.{os.getpid()}" if node.rank is None else _name_of_node(node.rank)
    join = JoinOptions(
        coordinators=(Address(_numeric(node.host), node.port),),
        token=_token(node),
        host=name,
        slots=options.workers,
        retry_s=node.wait_s,
        folder=os.getcwd(),
        grace_s=options.job.config.grace_s,
        tls=load_certificates(options.job.config.tls),
    )
    try:
        reserve_descriptors(options.workers)
        code = serve(join, report).exit_code
    except CannotJoin as error:
        report.note(str(error))
        return FAILED
    return code if code in (0, _INTERRUPTED) else FAILED
