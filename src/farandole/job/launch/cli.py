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

from farandole import __version__, registry
from farandole.base.command_parser import USAGE_ERROR, Parser
from farandole.errors import ConfigError
from farandole.job.launch.arguments import FARANDOLE_RUN, Program, RunOptions, parse_run
from farandole.job.launch.control_parser import COMMANDS as CONTROL

if TYPE_CHECKING:
    from farandole.job.coordinator.coordinator_factory import CoordinatorFactory
    from farandole.job.engines.discovery import HostDiscovery
    from farandole.job.engines.engine_interface import HostWatch
    from farandole.job.engines.host_list import HostSlots
    from farandole.job.launch.job_files import EventFile
    from farandole.job.launch.job_runner import EngineEvents
    from farandole.job.launch.job_state import JobState
    from farandole.job.launch.job_timeline import JobTimeline
    from farandole.job.launch.report import Report

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
    name = arguments[0] if arguments else ""
    if name == "run":
        return run_program(arguments[1:], FARANDOLE_RUN)
    if name == "stacks":
        from farandole.job.launch.stacks_command import stacks_command

        return stacks_command(arguments[1:])
    if name in CONTROL:
        from farandole.job.launch.control_commands import control_command

        return control_command(name, arguments[1:])
    if name in registry.COMMANDS:
        code: int = registry.part(registry.COMMANDS[name].function)(arguments[1:])
        return code
    parser = _main_parser()
    parser.parse_args(arguments)
    parser.print_help()
    return USAGE_ERROR


def run_program(arguments: Sequence[str] | None, program: Program) -> int:
    """Run the job of these arguments (sys.argv's unless given) and return its exit code. Raises SystemExit as main
    does."""
    try:
        return _run(parse_run(sys.argv[1:] if arguments is None else arguments, program))
    except KeyboardInterrupt:
        return INTERRUPTED


def _main_parser() -> argparse.ArgumentParser:
    asking = "|".join([*CONTROL, "page"])
    others = [each.usage for each in registry.COMMANDS.values() if each.usage]
    forms = ["run [options] command ...", f"{asking} [options]", *others]
    summaries = {
        "run": "train with several workers",
        **CONTROL,
        **{name: each.summary for name, each in registry.COMMANDS.items()},
    }
    parser = Parser(
        prog="farandole",
        usage="\n       ".join(f"farandole {form}" for form in forms),
        description="Elastic data-parallel training for PyTorch.",
        epilog="Commands; see 'farandole COMMAND --help':\n"
        + "\n".join(f"  {name:<14}{summary}" for name, summary in summaries.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-v", "--version", action="version", version=f"farandole {__version__}")
    parser.add_argument("command", choices=[*summaries], nargs="?", help=argparse.SUPPRESS)
    return parser


def _run(options: RunOptions) -> int:
    from farandole.job.coordinator.coordinator_factory import forked_factory

    with forked_factory() as factory:  # before there are threads: those of the report, and of the file of events
        return _run_job(options, factory)


def _run_job(options: RunOptions, factory: CoordinatorFactory | None) -> int:
    import asyncio

    from farandole.job.engines.ssh_engine import SshEngine
    from farandole.job.launch.checkpoint_place import beginning
    from farandole.job.launch.job_runner import PATIENCE_S, EngineEvents, JobSetup, in_turn, run_job
    from farandole.job.launch.output import output_options
    from farandole.job.launch.page_address import PageProcess
    from farandole.job.launch.report import Loudness, Report
    from farandole.job.launch.terminal_line import job_line

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
                slurm = registry.factory("Slurm engine")(
                    options.slurm, options.ssh.python, engine_events, options.requeues
                )
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
                        watch=None
                        if options.pods is None
                        else registry.factory("pod watch")(options.pods, engine_events),
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
    from farandole.job.launch.job_files import EventFile

    return nullcontext() if options.events is None else EventFile(options.events, report.note)


def _timeline(options: RunOptions, report: Report) -> AbstractContextManager[JobTimeline | None]:
    if options.timeline is None:
        return nullcontext()
    from farandole.job.launch.job_timeline import JobTimeline

    return JobTimeline(options.timeline, report.note)


def _state(options: RunOptions) -> AbstractContextManager[JobState | None]:
    if options.state is None:
        return nullcontext()
    joining = options.joining
    token = joining.token if joining is not None and joining.token_file else None
    if isinstance(options.state, str):
        assert token is not None  # joining.py has checked it
        state: AbstractContextManager[JobState] = registry.factory("etcd state")(
            options.state, options.command, options.config, token
        )
        return state
    from farandole.job.launch.job_state import locked_state

    return locked_state(options.state, options.command, options.config, token)


def _pod_watch(options: RunOptions, events: EngineEvents) -> HostWatch | None:
    if options.pods is None:
        return None
    watch: HostWatch = registry.factory("pod watch")(options.pods, events)
    return watch


def _hosts(options: RunOptions) -> tuple[HostSlots, ...] | HostDiscovery | None:
    if options.discovery_script is None:
        return options.hosts
    from farandole.job.engines.discovery import ScriptDiscovery

    return ScriptDiscovery(options.discovery_script, options.slots_per_host)
