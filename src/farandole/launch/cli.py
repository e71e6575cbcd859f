"""The command line: `farandole run -np 3 python train.py`. It starts without torch, and asyncio comes only
with a job to run, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from farandole import __version__
from farandole.errors import ConfigError
from farandole.launch.arguments import FARANDOLE_RUN, Program, RunOptions, parse_run
from farandole.launch.control_parser import COMMANDS as CONTROL
from farandole.launch.run_parser import USAGE_ERROR, Parser

if TYPE_CHECKING:
    from farandole.coordinator.coordinator_factory import CoordinatorFactory
    from farandole.engines.discovery import HostDiscovery
    from farandole.engines.host_list import HostSlots
    from farandole.launch.job_files import EventFile
    from farandole.launch.job_state import JobState
    from farandole.launch.job_timeline import JobTimeline
    from farandole.launch.report import Report

# What a shell makes of SIGINT, and of SIGPIPE.
INTERRUPTED = 130
READER_GONE = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `farandole` with these arguments (sys.argv's unless given) and return the exit code. Raises SystemExit after
    --help, --version and usage errors, as argparse does."""
    try:
        code = _command(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        if not _has_lost_reader(sys.stdout.fileno()):
            raise  # of another connection: an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    return code


def _has_lost_reader(descriptor: int) -> bool:
    """Return whether nobody reads this pipe any more, as in `farandole status | head` (man 2 poll, POLLERR)."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return bool(poll.poll(0))


def _command(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] == "run":
        return run_program(arguments[1:], FARANDOLE_RUN)
    if arguments and arguments[0] == "torchrun":
        from farandole.launch.torchrun_command import torchrun_command

        return torchrun_command(arguments[1:])
    if arguments and arguments[0] == "ledger":
        from farandole.launch.ledger_command import ledger_command

        return ledger_command(arguments[1:])
    if arguments and arguments[0] == "agent":
        from farandole.launch.agent_command import agent_command

        return agent_command(arguments[1:])
    if arguments and arguments[0] == "kubernetes":
        from farandole.launch.kubernetes_command import kubernetes_command

        return kubernetes_command(arguments[1:])
    if arguments and arguments[0] == "slurm":
        from farandole.launch.slurm_command import slurm_command

        return slurm_command(arguments[1:])
    if arguments and arguments[0] == "doctor":
        from farandole.launch.doctor_command import doctor_command

        return doctor_command(arguments[1:])
    if arguments and arguments[0] == "certificates":
        from farandole.launch.certificates_command import certificates_command

        return certificates_command(arguments[1:])
    if arguments and arguments[0] == "demo":
        from farandole.demo.demo_command import demo_command

        return demo_command(arguments[1:])
    if arguments and arguments[0] == "page":
        from farandole.launch.page_command import page_command

        return page_command(arguments[1:])
    if arguments and arguments[0] == "completion":
        from farandole.launch.completion_command import completion_command

        return completion_command(arguments[1:])
    if arguments and arguments[0] == "stacks":
        from farandole.launch.stacks_command import stacks_command

        return stacks_command(arguments[1:])
    if arguments and arguments[0] in CONTROL:
        from farandole.launch.control_commands import control_command

        return control_command(arguments[0], arguments[1:])
    parser = _main_parser()
    parser.parse_args(arguments)
    parser.print_help()
    return USAGE_ERROR


_OTHERS = ("page", "agent", "slurm", "kubernetes", "ledger", "doctor", "certificates", "completion", "demo")


def run_program(arguments: Sequence[str] | None, program: Program) -> int:
    """Run the job of these arguments (sys.argv's unless given) and return its exit code. Raises SystemExit as main
    does."""
    try:
        return _run(parse_run(sys.argv[1:] if arguments is None else arguments, program))
    except KeyboardInterrupt:
        return INTERRUPTED


def _main_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="farandole",
        usage="farandole run [options] command ...\n       farandole torchrun [options] script.py ...\n"
        "       farandole status|top|events|stacks|jobs|scale|drain|undrain|page [options]\n"
        "       farandole agent --join HOST:PORT [options]\n       farandole slurm grow|shrink N [options]\n"
        "       farandole kubernetes manifest [options] command ...\n       farandole ledger check DIR\n"
        "       farandole doctor [options]\n       farandole certificates DIR\n"
        "       farandole completion bash|zsh|fish\n       farandole demo",
        description="Elastic data-parallel training for PyTorch.",
        epilog="Commands:\n  run         train with several workers; see 'farandole run --help'\n"
        "  torchrun    train with torchrun's command line; see 'farandole torchrun --help'\n"
        + "".join(f"  {name:<12}{text}; see 'farandole {name} --help'\n" for name, text in CONTROL.items())
        + "  page        serve the live page of a job, and its metrics; see 'farandole page --help'\n"
        "  agent       offer this machine's slots to a job of another machine; see 'farandole agent --help'\n"
        "  kubernetes  print the objects of a job on Kubernetes; see 'farandole kubernetes manifest --help'\n"
        "  slurm       add nodes to a job, or remove them; see 'farandole slurm --help'\n"
        "  ledger      prove that each sample was trained once; see 'farandole ledger --help'\n"
        "  doctor      look at this machine, and at hosts, before a job runs; see 'farandole doctor --help'\n"
        "  certificates  make the certificates of a job whose connections are encrypted; see 'farandole certificates "
        "--help'\n"
        "  completion  print what lets a shell complete commands; see 'farandole completion --help'\n"
        "  demo        three workers train, one is killed, another one joins; see 'farandole demo --help'",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-v", "--version", action="version", version=f"farandole {__version__}")
    parser.add_argument(
        "command",
        choices=["run", "torchrun", *CONTROL, *_OTHERS],
        nargs="?",
        help=argparse.SUPPRESS,
    )
    return parser


def _run(options: RunOptions) -> int:
    from farandole.coordinator.coordinator_factory import forked_factory

    with forked_factory() as factory:  # before there are threads: those of the report, and of the file of events
        return _run_job(options, factory)


def _run_job(options: RunOptions, factory: CoordinatorFactory | None) -> int:
    import asyncio

    from farandole.engines.kubernetes_pods import PodWatch
    from farandole.engines.slurm_engine import SlurmEngine
    from farandole.engines.ssh_engine import SshEngine
    from farandole.launch.checkpoint_place import beginning
    from farandole.launch.job_runner import PATIENCE_S, EngineEvents, JobSetup, in_turn, run_job
    from farandole.launch.output import output_options
    from farandole.launch.page_address import PageProcess
    from farandole.launch.report import Loudness, Report
    from farandole.launch.terminal_line import job_line

    config, loudness = options.config, Loudness[options.loudness]
    report = Report(sys.stderr, loudness, line=job_line(options.progress, is_quiet=loudness == Loudness.QUIET))
    try:
        output = output_options(config, options.output_directory, options.prefix_timestamp)
        for note in options.notes:
            report.note(note)
        page = None if options.page is None else PageProcess(options.page)
        report.started(config, options.command)
        if page is not None:
            report.note(page.notice)
        with (
            _event_file(options, report) as events,
            _state(options) as state,
            beginning(options.checkpoint, state) as begun,
            _timeline(options, report) as timeline,
        ):
            for note in begun.notes:
                report.note(note)
            on_event = in_turn(
                report.on_event,
                None if events is None else events.on_event,
                begun.watch,
                None if timeline is None else timeline.on_event,
            )
            engine_events, slurm = EngineEvents(on_event), None
            if options.slurm is not None:
                slurm = SlurmEngine(options.slurm, options.ssh.python, engine_events, options.requeues)
                on_event = in_turn(on_event, slurm.watch)
                report.detail(str(options.slurm))
            ssh = None if options.joining is not None else SshEngine(options.ssh, engine_events)
            outcome = asyncio.run(
                run_job(
                    JobSetup(
                        config=config,
                        command=options.command,
                        hosts=slurm or _hosts(options),
                        engine=slurm or ssh,
                        engine_events=engine_events,
                        reason_to_end=None if slurm is None else slurm.reason_to_end,
                        interfaces=options.interfaces,
                        remote_folder=options.remote_folder,
                        host=options.host,
                        port=options.port,
                        output=output,
                        on_event=on_event,
                        extra_environment={**options.environment, **begun.environment},
                        origin=begun.origin,
                        joining=options.joining,
                        fork_server=options.fork_server,
                        watch=None if options.pods is None else PodWatch(options.pods, engine_events),
                        preemption=options.preemption,
                        factory=factory,
                        state=state,
                        patience_s=PATIENCE_S if state is None else options.patience_s,
                        page=page,
                        line=report.line,
                        on_summary=report.on_summary,
                    )
                )
            )
        report.ended(outcome.exit_code, outcome.reason)
        if slurm is not None and options.requeues and slurm.was_announced:
            report.note("the Slurm job goes back into the queue")  # before it ends this process, too
            if problem := asyncio.run(slurm.requeue()):
                report.note(problem)
        return outcome.exit_code
    except ConfigError as error:
        report.error(str(error))
        return USAGE_ERROR
    finally:
        report.close()


def _event_file(options: RunOptions, report: Report) -> AbstractContextManager[EventFile | None]:
    from farandole.launch.job_files import EventFile

    return nullcontext() if options.events is None else EventFile(options.events, report.note)


def _timeline(options: RunOptions, report: Report) -> AbstractContextManager[JobTimeline | None]:
    if options.timeline is None:
        return nullcontext()
    from farandole.launch.job_timeline import JobTimeline

    return JobTimeline(options.timeline, report.note)


def _state(options: RunOptions) -> AbstractContextManager[JobState | None]:
    if options.state is None:
        return nullcontext()
    joining = options.joining
    token = joining.token if joining is not None and joining.token_file else None
    if isinstance(options.state, str):
        from farandole.launch.etcd_state import etcd_state

        assert token is not None  # joining.py has checked it
        return etcd_state(options.state, options.command, options.config, token)
    from farandole.launch.job_state import locked_state

    return locked_state(options.state, options.command, options.config, token)


def _hosts(options: RunOptions) -> tuple[HostSlots, ...] | HostDiscovery | None:
    if options.discovery_script is None:
        return options.hosts
    from farandole.engines.discovery import ScriptDiscovery

    return ScriptDiscovery(options.discovery_script, options.slots_per_host)
