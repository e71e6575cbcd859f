"""`farandole stacks`: what the threads of workers of a running job do now, also of workers that hang."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from farandole.base.command_parser import USAGE_ERROR
from farandole.base.events.worker_events import main_first
from farandole.base.wire.control import StacksOfWorker, Status, WorkerSummary
from farandole.errors import AuthenticationError, ConfigError, ProtocolError
from farandole.job.launch.control_client import (
    DONE,
    NOT_DONE,
    Contact,
    NoAnswer,
    chosen_job,
    connected_client,
    print_error,
)
from farandole.job.launch.control_parser import control_parser

_MOST_NAMED = 16


def stacks_command(arguments: Sequence[str]) -> int:
    """Run the command. Return DONE; NOT_DONE when a worker could not write its stacks, or the job does not answer;
    USAGE_ERROR where it is not clear which job or worker is meant. Raises SystemExit as argparse does."""
    options = control_parser("stacks").parse_args(arguments)
    try:
        return asyncio.run(_show(options, chosen_job(options)))
    except ConfigError as error:
        return print_error("stacks", error, USAGE_ERROR)
    except (NoAnswer, AuthenticationError, ProtocolError) as error:
        return print_error("stacks", error, NOT_DONE)


async def _show(options: argparse.Namespace, job: Contact) -> int:
    client = await connected_client(job)
    try:
        workers = chosen_workers(await client.status(), options.ranks, options.worker or (), options.all)
        answers = {each.worker: each async for each in client.stacks([each.worker for each in workers])}
    finally:
        client.close()
    found = [(worker, answers[worker.worker]) for worker in workers]
    if options.json:
        print(msgspec.json.encode([as_dict(worker, answer) for worker, answer in found]).decode())
    else:
        print("\n\n".join(format_stacks(worker, answer) for worker, answer in found))
    for worker, answer in found:
        if answer.problem:
            print(f"farandole stacks: {called(worker)}: {answer.problem}", file=sys.stderr)
    return NOT_DONE if any(answer.problem for _, answer in found) else DONE


def chosen_workers(
    status: Status, ranks: Sequence[int], names: Sequence[str], are_all: bool
) -> tuple[WorkerSummary, ...]:
    """Return the chosen workers, members by rank before the others. Raises ConfigError that names those that there are,
    when none was chosen or one does not exist."""
    every = (*status.members, *status.newcomers)
    if are_all:
        if not every:
            raise ConfigError("the job has no worker at the moment")
        return every
    if not ranks and not names:
        raise ConfigError(f"give a RANK, --worker NAME or --all; {_there_are(status)}")
    for wanted, existing, what in (
        (ranks, {each.rank for each in status.members}, "rank"),
        (names, {each.worker for each in every}, "worker"),
    ):
        if missing := [str(each) for each in wanted if each not in existing]:
            raise ConfigError(f"the job has no {what} {' or '.join(missing)}; {_there_are(status)}")
    return tuple(each for each in every if each.rank in ranks or each.worker in names)


def called(worker: WorkerSummary) -> str:
    """Return how a worker is called in this command's output."""
    rank = "without a rank" if worker.rank is None else f"rank {worker.rank}"
    return f"{worker.worker} ({rank}, pid {worker.pid or 'unknown'} on {worker.host})"


def format_stacks(worker: WorkerSummary, answer: StacksOfWorker) -> str:
    """Return the stacks of one worker as text, its main thread first."""
    step = "" if worker.step is None else f", step {worker.step}"
    text = main_first(answer.text) if answer.text else "no stacks: the worker could not write them"
    return f"{called(worker)} {worker.state}{step}\n{text}"


def as_dict(worker: WorkerSummary, answer: StacksOfWorker) -> dict[str, Any]:
    """Return the stacks of one worker for JSON."""
    return {
        "worker": worker.worker,
        "rank": worker.rank,
        "host": worker.host,
        "pid": worker.pid,
        "state": worker.state,
        "step": worker.step,
        "stacks": answer.text,
        "problem": answer.problem,
    }


def _there_are(status: Status) -> str:
    ranks, names = len(status.members), [each.worker for each in (*status.members, *status.newcomers)]
    if not names:
        return "it has no worker at the moment"
    shown = ", ".join(names[:_MOST_NAMED]) + (f" and {len(names) - _MOST_NAMED} more" if names[_MOST_NAMED:] else "")
    of_ranks = "no ranks yet" if not ranks else "rank 0" if ranks == 1 else f"ranks 0 to {ranks - 1}"
    return f"it has {of_ranks}, and the workers {shown}"
