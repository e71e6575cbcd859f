"""What can be asked of `farandole run`: options, checked, and a command, untouched. Used by cli.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from farandole.config import JobConfig
from farandole.errors import ConfigError
from farandole.launch.command import checked

USAGE_ERROR = 2


@dataclass(frozen=True)
class RunOptions:
    """One `farandole run`, checked as far as its words allow."""

    config: JobConfig
    command: tuple[str, ...]
    host: str
    port: int
    output_directory: Path | None
    prefix_timestamp: bool
    loudness: str  # the name of a report.Loudness


def parse_run(arguments: Sequence[str]) -> RunOptions:
    """What the arguments behind `farandole run` ask for. From the first word on that is no option of ours,
    they are the user's and are not looked into. Raises SystemExit when they cannot work."""
    parser, with_value = _run_parser()
    ours, command = split_command(arguments, with_value)
    options = parser.parse_args(ours)
    try:
        if options.num_proc is None:
            raise ConfigError("how many workers? say so with -np, for example -np 3")
        _check_address(options.host, options.port)
        return RunOptions(
            config=JobConfig(
                num_proc=options.num_proc,
                min_np=options.min_np,
                max_np=options.max_np,
                restarts=options.restarts,
                elastic_timeout_s=options.elastic_timeout,
                start_timeout_s=options.start_timeout,
                detection_budget_s=options.detection_budget,
                grace_s=options.grace,
            ),
            command=tuple(checked(command)),
            host=options.host,
            port=options.port,
            output_directory=options.output_filename,
            prefix_timestamp=options.prefix_timestamp,
            loudness=options.loudness,
        )
    except ConfigError as error:
        parser.error(str(error))


def split_command(arguments: Sequence[str], with_value: frozenset[str]) -> tuple[list[str], list[str]]:
    """Our options, and the user's command: it begins at the first word that is neither an option nor the
    value of one, or behind `--`. `with_value`: the options whose value is the next word."""
    index = 0
    while index < len(arguments) and arguments[index].startswith("-"):
        if arguments[index] == "--":
            return list(arguments[:index]), list(arguments[index + 1 :])
        index += 2 if arguments[index] in with_value else 1
    return list(arguments[:index]), list(arguments[index:])


def _check_address(host: str, port: int) -> None:
    import ipaddress

    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise ConfigError(
            f"--host {host}: only a loopback address such as 127.0.0.1 is possible, because what agents and "
            "workers say to each other is not encrypted yet"
        )
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port must be between 0 and 65535, got {port}")


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, not below a page of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: {message}\nTry '{self.prog} --help'.\n")


def _run_parser() -> tuple[argparse.ArgumentParser, frozenset[str]]:
    """The parser of our own options, and which of them take a value."""
    parser = Parser(
        prog="farandole run",
        usage="farandole run -np N [options] command ...",
        description="Run a command as N workers that train one model, and go on when some are lost or join.",
        epilog="Example: farandole run -np 3 --min-np 2 python train.py --epochs 10",
        allow_abbrev=False,
    )
    actions = [
        *_size_options(parser),
        *_time_options(parser),
        *_output_options(parser),
        *_address_options(parser),
    ]
    with_value = (action.option_strings for action in actions if action.nargs != 0)
    return parser, frozenset(flag for flags in with_value for flag in flags)


def _size_options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    add = parser.add_argument_group("how many workers").add_argument
    return [
        add(
            "-np",
            "-n",
            "--num-proc",
            type=int,
            metavar="N",
            help="workers to start with and to keep (required)",
        ),
        add(
            "--min-np",
            "--min-num-proc",
            type=int,
            default=JobConfig.min_np,
            metavar="N",
            help="fewest workers that may go on training (default: %(default)s)",
        ),
        add(
            "--max-np",
            "--max-num-proc",
            type=int,
            default=JobConfig.max_np,
            metavar="N",
            help="most workers that may ever train (default: as many as -np)",
        ),
        add(
            "--restarts",
            type=int,
            default=JobConfig.restarts,
            metavar="N",
            help="how often a lost worker is replaced, for each slot (default: %(default)s)",
        ),
    ]


def _time_options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    group = parser.add_argument_group("time limits, in seconds")
    return [
        group.add_argument(flag, type=float, default=default, metavar="S", help=f"{text} (default: %(default)g)")
        for flag, default, text in (
            (
                "--elastic-timeout",
                JobConfig.elastic_timeout_s,
                "how long a job may have fewer than --min-np workers",
            ),
            (
                "--start-timeout",
                JobConfig.start_timeout_s,
                "from the first worker's init() to the last one's",
            ),
            ("--detection-budget", JobConfig.detection_budget_s, "how long a hung worker may stay unnoticed"),
            ("--grace", JobConfig.grace_s, "from SIGTERM to SIGKILL when a worker is stopped"),
        )
    ]


def _output_options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    group = parser.add_argument_group("output")
    loudness = group.add_mutually_exclusive_group()
    parser.set_defaults(loudness="NORMAL")
    return [
        group.add_argument(
            "--output-filename",
            type=Path,
            metavar="DIR",
            help="also write what workers print to DIR/rank.N/stdout and stderr",
        ),
        group.add_argument(
            "-prefix-timestamp",
            "--prefix-timestamp",
            action="store_true",
            help="begin each line of a worker with the time",
        ),
        loudness.add_argument(
            "-q",
            "--quiet",
            dest="loudness",
            action="store_const",
            const="QUIET",
            help="only warnings and the end",
        ),
        loudness.add_argument(
            "--verbose", dest="loudness", action="store_const", const="VERBOSE", help="every event of the job"
        ),
    ]


def _address_options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    add = parser.add_argument_group("where the coordinator listens").add_argument
    return [
        add("--host", default="127.0.0.1", help="a loopback address (default: %(default)s)"),
        add("--port", type=int, default=0, help="default: a free one"),
    ]
