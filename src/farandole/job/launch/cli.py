"""The command line: `farandole run -np 3 python train.py`. It starts without torch, and asyncio comes only
with a job to run, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from farandole import __version__, registry
from farandole.base.command_parser import USAGE_ERROR, Parser
from farandole.errors import ConfigError
from farandole.job.launch.arguments import FARANDOLE_RUN, Program, parse_run
from farandole.job.launch.control_parser import COMMANDS as CONTROL

if TYPE_CHECKING:
    from farandole.job.coordinator.coordinator_factory import CoordinatorFactory
    from farandole.job.launch.job_spec import JobSpec

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


def _run(spec: JobSpec) -> int:
    from farandole.job.coordinator.coordinator_factory import forked_factory

    with forked_factory() as factory:  # before there are threads: those of the report, and of the file of events
        return _launch(spec, factory)


def _launch(spec: JobSpec, factory: CoordinatorFactory | None) -> int:
    from farandole.job.launch.job_runner import Additions
    from farandole.job.launch.launcher import launch, reporting

    with reporting(spec) as report:
        try:
            if spec.slurm is not None:
                code: int = registry.factory("launcher in Slurm")(spec, report, factory)
                return code
            outcome = launch(spec, report, Additions(factory=factory))
            report.ended(outcome.exit_code, outcome.reason)
            return outcome.exit_code
        except ConfigError as error:
            report.note(str(error))
            return USAGE_ERROR
