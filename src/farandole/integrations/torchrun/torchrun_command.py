"""`farandole torchrun script.py`: torchrun's command line, for jobs of Farandole."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING

from farandole.base.command_parser import USAGE_ERROR
from farandole.base.config import JobConfig
from farandole.base.env import read_token
from farandole.base.wire.authentication import checked_token
from farandole.errors import ConfigError
from farandole.integrations.torchrun.torchrun_parser import Node, TorchrunOptions, parse_torchrun
from farandole.job.launch.joining import Joining, read_token_file

if TYPE_CHECKING:
    from farandole.job.coordinator.coordinator_factory import CoordinatorFactory
    from farandole.job.coordinator.server import Outcome
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
    from farandole.job.launch.report import Loudness, Report
    from farandole.job.launch.terminal_line import job_line

    loudness = Loudness[options.loudness]
    report = Report(sys.stderr, loudness, line=job_line(options.progress, is_quiet=loudness == Loudness.QUIET))
    try:
        for note in options.notes:
            report.note(note)
        return _run_or_join(options, report, factory)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except ConfigError as error:
        report.error(str(error))
        return USAGE_ERROR
    finally:
        report.close()


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


def job_config(options: TorchrunOptions) -> JobConfig:
    """Return the configuration of the job: of a fixed size, unless the number of nodes may change, or the script has an
    elastic function."""
    may_change = options.nodes != options.most_nodes
    return JobConfig(
        num_proc=options.workers * options.nodes,
        min_np=options.workers * options.nodes if may_change else 1,
        max_np=options.workers * options.most_nodes,
        fills_slots=may_change,
        last_call_s=0.0 if options.node is None else options.node.last_call_s,
        max_restarts=options.max_restarts,
        grace_s=options.grace_s,
        takes_agents=options.node is not None,
        start_timeout_s=JobConfig.start_timeout_s if options.node is None else options.node.wait_s,
        tls=options.tls,
    )


def _run(options: TorchrunOptions, report: Report, factory: CoordinatorFactory | None) -> int:
    import asyncio

    from farandole.integrations.torchrun.torchrun_output import FailureReport, TorchrunOutput, run_folder
    from farandole.job.engines.host_list import HostSlots
    from farandole.job.launch.job_files import EventFile
    from farandole.job.launch.job_runner import JobSetup, in_turn, run_job
    from farandole.job.launch.output import OutputOptions
    from farandole.job.launch.page_address import PageProcess

    config, node = job_config(options), options.node
    folder = run_folder(options)
    if folder is not None and options.log_dir is None:
        report.note(f"the logs are in {folder}")
    failures = FailureReport()
    page = None if options.page is None else PageProcess(options.page)
    report.started(config, options.command)
    if page is not None:
        report.note(page.notice)

    async def run() -> Outcome:
        sink = TorchrunOutput(options, folder, line=report.line)
        return await run_job(
            JobSetup(
                config=config,
                command=options.command,
                hosts=(HostSlots("localhost", options.workers),),
                host="127.0.0.1" if node is None else _numeric(node.host),
                port=0 if node is None else node.port,
                output=OutputOptions(),
                on_event=in_turn(
                    sink.on_event, failures.on_event, report.on_event, None if events is None else events.on_event
                ),
                extra_environment=options.environment,
                joining=None if node is None else _joining(node),
                fork_server=options.fork_server,
                sink=sink,
                error_folder="" if folder is None else str(folder),
                order_of_hosts=_order_of_hosts(options, node),
                factory=factory,
                page=page,
                on_summary=report.on_summary,
            )
        )

    with (
        nullcontext() if options.events is None else EventFile(options.events, report.note) as events,
        nullcontext() if page is None else closing(page),
    ):
        outcome = asyncio.run(run())
    from farandole.job.coordinator.shutdown import STOPPED_EXIT_CODE

    code = outcome.exit_code if outcome.exit_code in (0, STOPPED_EXIT_CODE) else FAILED
    if code == FAILED and (text := failures.text(options.name)):
        report.note(text)
    report.ended(code, outcome.reason)
    return code


# Several nodes: the first one runs the coordinator, and the others join as `farandole agent --join` does --------------


def _order_of_hosts(options: TorchrunOptions, node: Node | None) -> dict[str, int] | None:
    """Return the hosts with their slots in the order of their ranks; None where the order of joining counts."""
    if node is None or node.rank is None:
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
        grace_s=options.grace_s,
        tls=load_certificates(options.tls),
    )
    try:
        reserve_descriptors(options.workers)
        code = serve(join, report).exit_code
    except CannotJoin as error:
        report.error(str(error))
        return FAILED
    return code if code in (0, _INTERRUPTED) else FAILED
