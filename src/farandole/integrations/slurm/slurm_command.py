"""`farandole slurm grow N` and `farandole slurm shrink N`: nodes that are added to a running job by Slurm jobs of one
node, which run only an agent, and removed by their cancellation."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from farandole.base.command_parser import USAGE_ERROR, Parser, add_json
from farandole.base.env import read_slurm_variables, slurm_client_environment, slurm_folder
from farandole.errors import ConfigError
from farandole.integrations.slurm.slurm_engine import growth_name
from farandole.job.launch.job_files import read_job_file
from farandole.job.launch.joining import slurm_job_file

DONE, NOT_DONE = 0, 1

_COMMAND_S = 60.0
_ANNOUNCED_S = 90
# It becomes the agent, so that Slurm's signals to the batch script reach it. Its only secret is in the file.
_SCRIPT = "#!/bin/sh\nexec {command}\n"


class SlurmFailed(Exception):
    """One of Slurm's commands has failed."""


def slurm_command(arguments: Sequence[str]) -> int:
    """Run the command and return the exit code. Raises SystemExit as argparse does."""
    ours = list(arguments)
    more = ours[ours.index("--") + 1 :] if "--" in ours else []
    options = slurm_parser().parse_args(ours[: len(ours) - len(more) - 1] if "--" in ours else ours)
    try:
        if options.count < 1:
            raise ConfigError(f"N must be at least 1, got {options.count}")
        job, path = _chosen(options)
        if options.action == "grow":
            told = _grow(job, path, options.count, more)
        elif more:
            raise ConfigError(f"shrink takes no options of sbatch, got {shlex.join(more)}")
        else:
            told = _shrink(job, options.count)
        print(json.dumps(told.values) if options.json else told.text)
        return DONE
    except ConfigError as error:
        print(f"farandole slurm {options.action}: {error}", file=sys.stderr)
        return USAGE_ERROR
    except SlurmFailed as error:
        print(f"farandole slurm {options.action}: {error}", file=sys.stderr)
        return NOT_DONE


def slurm_parser() -> argparse.ArgumentParser:
    """Return the parser of its options."""
    parser = Parser(
        prog="farandole slurm",
        usage="farandole slurm grow N [--job ID] [-- options of sbatch]\n       farandole slurm shrink N [--job ID]",
        description="Add nodes to a job of `farandole run --slurm`, or remove nodes that were added. grow submits an "
        "array of N Slurm jobs of one node each; each joins the job when it begins, and leaves it without a lost step "
        "when Slurm ends it. shrink cancels N of them: those that have not begun first, then the newest ones.",
        epilog="Example: farandole slurm grow 4 -- --partition=preemptible --gpus-per-node=8 --time=2:00:00",
        allow_abbrev=False,
    )
    parser.add_argument("action", choices=("grow", "shrink"))
    parser.add_argument("count", type=int, metavar="N", help="number of nodes")
    parser.add_argument(
        "--job", metavar="ID", help="the Slurm job of `farandole run` (default: this one, or the only one)"
    )
    parser.add_argument(
        "--job-file", type=Path, metavar="FILE", help="the file of `farandole run --job-file FILE`, if it was given"
    )
    add_json(parser)
    return parser


def _chosen(options: argparse.Namespace) -> tuple[str, Path]:
    """Return the Slurm job that is to grow, and the job file of `farandole run` in it."""
    inside = read_slurm_variables()
    job = options.job or (inside.job if inside is not None else "")
    files = {path.stem.removeprefix("slurm-"): path for path in sorted(Path(slurm_folder()).glob("slurm-*.job"))}
    if not job and len(files) == 1 and options.job_file is None:
        (job,) = files
    if not job:
        found = f"those of {', '.join(files)} are in {slurm_folder()}" if files else f"none is in {slurm_folder()}"
        raise ConfigError(f"give the number of the Slurm job with --job; of the job files, {found}")
    path = slurm_job_file(job) if options.job_file is None else options.job_file.absolute()
    read_job_file(path)
    return job, path


class _Told(NamedTuple):
    """The result of the command, for people and for programs."""

    text: str
    values: dict[str, object]


def _grow(job: str, path: Path, count: int, more: Sequence[str]) -> _Told:
    agent = [sys.executable, "-m", "farandole", "agent", "--slurm", "--job-file", str(path)]
    command = [
        *("sbatch", "--parsable", f"--array=1-{count}", "--nodes=1", f"--job-name={growth_name(job)}"),
        *(f"--signal=B:USR1@{_ANNOUNCED_S}", "--open-mode=append", "--output=farandole-%A_%a.out", *more),
    ]
    number = _run(command, _SCRIPT.format(command=shlex.join(agent))).strip().partition(";")[0]
    nodes = "1 node" if count == 1 else f"{count} nodes"
    text = f"Slurm job {number} adds {nodes} to job {job} when it begins; its output is in {os.getcwd()}"
    return _Told(text, {"job": job, "slurm_job": number, "nodes": count, "output_folder": os.getcwd()})


class _Added(NamedTuple):
    """A Slurm job that adds, or will add, a node."""

    is_running: bool
    number: int
    name: str


def _shrink(job: str, count: int) -> _Told:
    output = _run(
        ["squeue", "--noheader", "--me", "--array", f"--name={growth_name(job)}", "--format=%i|%T|%A"],
    )
    added = []
    for line in filter(None, output.splitlines()):
        name, state, number = line.strip().split("|")
        added.append(_Added(state != "PENDING", int(number), name))
    # Tasks of an array have increasing numbers once they have begun, and share one before.
    chosen = sorted(added, key=lambda each: (each.is_running, -each.number, -_task(each.name)))[:count]
    if not chosen:
        raise SlurmFailed(f"no node was added to job {job} by `farandole slurm grow`")
    _run(["scancel", *(each.name for each in chosen)])
    missing = "" if len(chosen) == count else f"; no more were added, so {count - len(chosen)} less than requested"
    names = [each.name for each in chosen]
    values: dict[str, object] = {"job": job, "cancelled": names, "missing": count - len(chosen)}
    return _Told(f"cancelled {', '.join(names)}{missing}", values)


def _task(name: str) -> int:
    """Return the task of an array from 12_3."""
    digits = name.partition("_")[2]
    return int(digits) if digits.isdecimal() else 0


def _run(command: Sequence[str], text: str | None = None) -> str:
    """Return the output of one of Slurm's commands."""
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=_COMMAND_S, env=slurm_client_environment()
        )
    except FileNotFoundError:
        raise ConfigError(f"there is no {command[0]} in PATH: run this where Slurm's commands are installed") from None
    except subprocess.TimeoutExpired:
        raise SlurmFailed(f"{command[0]} did not answer within {_COMMAND_S:g} s") from None
    if done.returncode != 0:
        raise SlurmFailed(f"{command[0]} ended with exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout
