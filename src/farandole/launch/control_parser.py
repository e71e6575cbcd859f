"""The options of `farandole status`, `jobs`, `scale`, `drain` and `undrain`, which load no asyncio."""

from __future__ import annotations

import argparse
from pathlib import Path

from farandole.launch.run_parser import Parser

COMMANDS = {
    "status": "how a job that runs is, or which there are",
    "jobs": "which jobs of this user run here",
    "scale": "change the number of a job's workers",
    "drain": "have a host's workers leave, with nothing redone",
    "undrain": "let a drained host be used again",
}

WAIT_S = 600.0


def control_parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of one of COMMANDS."""
    parser = Parser(prog=f"farandole {command}", description=f"{COMMANDS[command].capitalize()}.", allow_abbrev=False)
    if command == "scale":
        parser.add_argument("size", type=int, metavar="N", help="workers that the job should have")
    elif command in ("drain", "undrain"):
        parser.add_argument("host", metavar="HOST", help="its name, as `farandole status` shows it")
    if command in ("status", "jobs"):
        parser.add_argument("--json", action="store_true", help="everything, as JSON")
    if command == "jobs":
        return parser
    add = parser.add_argument_group("which job (not needed where only one runs)").add_argument
    add("--job", metavar="ID", help="a job of this user that runs here, by the beginning of its name")
    add("--address", metavar="HOST:PORT", help="where the coordinator of a job elsewhere listens")
    add("--token-file", type=Path, metavar="FILE", help="a copy of the file that job was given as --token-file")
    if command in ("scale", "drain"):
        group = parser.add_argument_group("when to return (default: once it is accepted)")
        group.add_argument("--wait", action="store_true", help="once it is done")
        group.add_argument(
            "--timeout",
            type=float,
            default=WAIT_S,
            metavar="S",
            help="with --wait: seconds after which to give up waiting; the job goes on with it (default: %(default)g)",
        )
    return parser
