"""The options of `farandole status`, `top`, `events`, `stacks`, `jobs`, `scale`, `drain` and `undrain`, which load no
asyncio."""

from __future__ import annotations

import argparse
from pathlib import Path

from farandole.base.command_parser import Parser, add_json

COMMANDS = {
    "status": "show the status of a running job, or list the running jobs",
    "top": "show the status of a running job again and again",
    "events": "print the events of a running job",
    "stacks": "show what the threads of a worker do now, also of one that hangs",
    "jobs": "list the jobs of this user on this machine",
    "scale": "change the number of a job's workers",
    "drain": "remove a host's workers at the next boundary, without a lost step",
    "undrain": "allow a drained host to be used again",
}

WAIT_S = 600.0
_MOST_OFTEN_S = 0.1


def control_parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of one of COMMANDS."""
    parser = Parser(prog=f"farandole {command}", description=f"{COMMANDS[command].capitalize()}.", allow_abbrev=False)
    if command == "scale":
        parser.add_argument("size", type=int, metavar="N", help="workers that the job should have")
        parser.add_argument(
            "--yes", action="store_true", help="do not ask before another user's job is changed (with --job-file)"
        )
    elif command in ("drain", "undrain"):
        parser.add_argument("host", metavar="HOST", help="name of the host, as `farandole status` shows it")
    elif command == "stacks":
        add_worker_selection(parser)
    add_json(parser)
    if command == "status":
        parser.add_argument(
            "--watch",
            type=_seconds,
            nargs="?",
            const=1.0,
            metavar="S",
            help="show it again every S seconds, until the job has ended (S: 1 unless given, at least 0.1)",
        )
    if command == "top":
        parser.add_argument(
            "--every",
            type=_seconds,
            default=1.0,
            metavar="S",
            help="seconds between two looks, at least 0.1 (default: %(default)g)",
        )
    if command == "events":
        parser.add_argument(
            "-f", "--follow", action="store_true", help="print new ones as they happen, until the job has ended"
        )
    if command == "jobs":
        return parser
    add_job_selection(parser)
    if command in ("scale", "drain"):
        group = parser.add_argument_group("when to return (default: when the request is accepted)")
        group.add_argument("--wait", action="store_true", help="when the request is completed")
        group.add_argument(
            "--timeout",
            type=float,
            default=WAIT_S,
            metavar="S",
            help="with --wait: maximum seconds to wait; the job completes the request later (default: %(default)g)",
        )
    return parser


def add_worker_selection(parser: argparse.ArgumentParser) -> None:
    """Add the options that select workers of a job."""
    parser.add_argument("ranks", type=int, nargs="*", metavar="RANK", help="ranks, as `farandole status` shows them")
    parser.add_argument("--worker", action="append", metavar="NAME", help="a worker by its name, also without a rank")
    parser.add_argument("--all", action="store_true", help="all workers of the job")


def add_job_selection(parser: argparse.ArgumentParser) -> None:
    """Add the options that select a running job."""
    add = parser.add_argument_group("selection of the job (not needed if only one runs)").add_argument
    add("--job", metavar="ID", help="a job of this user on this machine, by the beginning of its name")
    add("--job-file", type=Path, metavar="FILE", help="the file of `farandole run --job-file FILE`, on any machine")
    add("--address", metavar="HOST:PORT", help="address of the coordinator of a job on another machine")
    add("--token-file", type=Path, metavar="FILE", help="a copy of the token file of that job")
    add("--tls", type=Path, metavar="DIR", help="a copy of that job's folder of certificates, if it has one")


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds >= _MOST_OFTEN_S:
        raise argparse.ArgumentTypeError(f"must be at least {_MOST_OFTEN_S:g} s, got {text}")
    return seconds
