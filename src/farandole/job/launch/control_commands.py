"""`farandole status`, `top`, `events`, `stacks`, `jobs`, `scale`, `drain` and `undrain`: requests to a running job, and
the answers as text."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from farandole.base.command_parser import USAGE_ERROR
from farandole.base.events.event import count
from farandole.base.events.worker_events import main_first
from farandole.base.machine import local_time, wall_time_s
from farandole.base.wire.control import (
    Accepted,
    AskDrain,
    AskScale,
    AskUndrain,
    ClientMessage,
    HostStatus,
    StacksOfWorker,
    Status,
    WorkerSummary,
    is_drained,
    is_scaled,
)
from farandole.errors import AuthenticationError, ConfigError, ProtocolError
from farandole.job.launch.control_client import (
    DONE,
    NOT_DONE,
    Client,
    Contact,
    JobEnded,
    NoAnswer,
    NoConsent,
    chosen_job,
    connected_client,
    line_of,
    list_of,
    require_consent,
)
from farandole.job.launch.control_parser import control_parser
from farandole.job.launch.job_files import JobFile, running
from farandole.job.launch.job_history import epoch_of

_MOST_NAMED = 16
_CLEARED = "\x1b[H\x1b[2J"  # the cursor is at the top of an empty screen: ECMA-48, CUP and ED


def control_command(command: str, arguments: Sequence[str]) -> int:
    """Run a command. Return DONE; NOT_DONE when the job refused, does not answer, or did not finish in time, and when a
    worker could not write its stacks; USAGE_ERROR where it is not clear which job or worker is meant. Raises SystemExit
    as argparse does."""
    options = control_parser(command).parse_args(arguments)
    try:
        if command == "jobs":
            return _jobs(options.json)
        if command == "status" and not (options.job or options.address or options.job_file):
            jobs = running()
            if len(jobs) != 1 and options.json:  # always one job's status, or nothing
                how = "--json shows one job, select it with --job (farandole jobs --json lists all jobs)"
                return _print_error(command, f"{how}; {list_of(jobs)}", NOT_DONE)
            if len(jobs) != 1:
                return _jobs(as_json=False)
        if command == "scale" and not options.yes:
            require_consent(options.job_file, f"scale it to {options.size} workers")
        return asyncio.run(_ask(command, options, chosen_job(options)))
    except ConfigError as error:
        return _print_error(command, error, USAGE_ERROR)
    except (NoAnswer, NoConsent, AuthenticationError, ProtocolError) as error:
        return _print_error(command, error, NOT_DONE)


def _print_error(command: str, error: object, code: int) -> int:
    """Print why the command cannot do what it should, and return the exit code."""
    print(f"farandole {command}: {error}", file=sys.stderr)
    return code


async def _ask(command: str, options: argparse.Namespace, job: Contact) -> int:
    client = await connected_client(job)
    try:
        match command:
            case "status":
                await _show_status(client, options.json, options.watch)
            case "top":
                await _show_status(client, options.json, options.every)
            case "events":
                await _print_events(client, options)
            case "stacks":
                return await _show_stacks(client, options)
            case _:
                return await _change(command, client, job, options)
        return DONE
    finally:
        client.close()


async def _change(command: str, client: Client, job: Contact, options: argparse.Namespace) -> int:
    """Print what the job will do, and with --wait that it has done it; as JSON all of it at the end, where `is_done` is
    null unless that was waited for. Raises NoAnswer when it has not in time."""
    request, is_done = _request(command, options)
    answer = await client.ask(request)
    if not isinstance(answer, Accepted):
        reason = getattr(answer, "reason", f"unexpected answer {type(answer).__name__}")
        return _print_error(command, f"{job.name}: {reason}", NOT_DONE)
    told: dict[str, object] = {"job": job.job, "what": answer.what, "is_done": None}
    if not options.json:
        print(f"{job.name}: {answer.what}", flush=True)
    try:
        if is_done is not None and options.wait:
            told["is_done"] = False
            status = await client.wait_until(is_done, options.timeout)
            told |= {"is_done": True, "generation": status.generation, "workers": len(status.members)}
            if not options.json:
                print(f"done: generation {status.generation} has {len(status.members)} workers")
    finally:
        if options.json:
            print(json.dumps(told))
    return DONE


def _request(command: str, options: argparse.Namespace) -> tuple[ClientMessage, Callable[[Status], bool] | None]:
    """Return the message to the coordinator, and the condition on its status that shows completion, where that takes a
    while."""
    if command == "scale":
        return AskScale(options.size), partial(is_scaled, size=options.size)
    if command == "drain":
        return AskDrain(options.host), partial(is_drained, host=options.host)
    return AskUndrain(options.host), None


async def _print_events(client: Client, options: argparse.Namespace) -> None:
    """Print a line for each event: the local time and its text, or JSON as in the file of --events."""
    try:
        async for event in client.events(options.follow):
            time_s = wall_time_s() - event.ago_s
            if options.json:
                text = json.dumps({"time": round(time_s, 3), "level": event.level, **event.fields})
            else:
                text = f"{local_time(time_s)}  {event.line}"
            print(text, flush=True)
    except JobEnded as error:
        print(error, file=sys.stderr)


async def _show_status(client: Client, as_json: bool, every_s: float | None) -> None:
    """Print the status, and with `every_s` again and again until the job has ended: on a terminal in one place, else
    one after the other."""
    is_screen = every_s is not None and sys.stdout.isatty() and not as_json
    while True:
        try:
            status = await client.status()
        except JobEnded as error:
            if every_s is None:
                raise
            print(error, file=sys.stderr)
            return
        text = msgspec.json.encode(status).decode() if as_json else "\n".join(format_status(status))
        print(f"{_CLEARED}{text}" if is_screen else text, flush=True)
        if every_s is None:
            return
        await asyncio.sleep(every_s)
        if not (is_screen or as_json):
            print()


def _jobs(as_json: bool) -> int:
    jobs = running()
    if as_json:
        print(msgspec.json.encode([_without_token(job) for job in jobs]).decode())
    else:
        print("\n".join(line_of(job) for job in jobs) if jobs else "no job of this user runs here")
    return DONE


def _without_token(job: JobFile) -> dict[str, object]:
    return {
        "job": job.job,
        "pid": job.pid,
        "coordinator": str(job.coordinator),
        "command": job.command,
        "started_s": job.started_s,
    }


# The stacks of workers ------------------------------------------------------------------------------------------------


async def _show_stacks(client: Client, options: argparse.Namespace) -> int:
    workers = chosen_workers(await client.status(), options.ranks, options.worker or (), options.all)
    answers = {each.worker: each async for each in client.stacks([each.worker for each in workers])}
    found = [(worker, answers[worker.worker]) for worker in workers]
    if options.json:
        print(msgspec.json.encode([stacks_as_dict(worker, answer) for worker, answer in found]).decode())
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


def stacks_as_dict(worker: WorkerSummary, answer: StacksOfWorker) -> dict[str, Any]:
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


# The status of a job as text for a terminal ---------------------------------------------------------------------------

_EVENTS_SHOWN = 8


def format_status(status: Status) -> list[str]:
    """Return the status as lines of text."""
    lines = [f"job {status.job}: {_headline(status)}"]
    if status.members or status.newcomers:
        lines += ["", *_workers((*status.members, *status.newcomers))]
    if status.hosts:
        lines += ["", *_hosts(status.hosts)]
    there = sum(each.slots for each in status.hosts if not (each.is_drained or each.out_for_s))
    if there < status.wanted:
        missing = status.wanted - there
        lines.append(f"waiting for {count(missing, 'more slot')} ({there} of {status.wanted} are available)")
    lines += [
        f"slot {each.slot} on {each.host} is in backoff for {each.for_s:.1f} s more, "
        f"after {each.failures} failures in a row"
        for each in status.backoffs
    ]
    if status.events:
        lines += ["", "last events"]
        lines += [f"  {_ago(event.ago_s):>7} ago  {event.line}" for event in status.events[-_EVENTS_SHOWN:]]
    return lines


def _headline(status: Status) -> str:
    parts = [status.state]
    if status.generation:
        parts.append(f"generation {status.generation}")
    if status.change:
        parts.append(f"change to generation {status.change} under way")
    if status.step is not None:
        parts.append(f"step {status.step}")
    epoch, trained, samples = epoch_of(status)
    if samples:
        parts.append(f"epoch {epoch} ({trained:,} of {samples:,} samples, {trained / samples:.0%})")
    most = "" if status.max_np is None else f", at most {status.max_np}"
    parts.append(f"{len(status.members)} of {status.wanted} workers (at least {status.min_np}{most})")
    if status.spares:
        waiting = sum(each.state == "waits" for each in status.newcomers)
        parts.append(f"{waiting} of {status.spares} spares wait")
    parts.append(count(status.regroups, "regroup"))
    parts.append(f"coordinator pid {status.coordinator_pid}")
    return ", ".join(parts)


def _workers(workers: Sequence[WorkerSummary]) -> list[str]:
    is_measured = any(each.telemetry is not None for each in workers)
    is_balanced = any(each.telemetry is not None and each.telemetry.share for each in workers)
    rows: list[tuple[str, ...]] = [("rank", "worker", "host", "slot", "pid", "state", "step", "restarts left")]
    if is_measured:
        rows[0] = (*rows[0], "step time", "of it waiting", "memory", "cores")
    if is_balanced:
        rows[0] = (*rows[0], "share", "samples/s")
    for each in workers:
        rank = "-" if each.rank is None else str(each.rank)
        pid = str(each.pid) if each.pid else "-"
        step = "-" if each.step is None else str(each.step)
        row = (rank, each.worker, each.host, str(each.slot), pid, each.state, step, str(each.restarts_left))
        rows.append((*row, *(_measured(each) if is_measured else ()), *(_balanced(each) if is_balanced else ())))
    return _table(rows)


def _balanced(worker: WorkerSummary) -> tuple[str, ...]:
    telemetry = worker.telemetry
    if telemetry is None or not telemetry.share:
        return "-", "-"
    return f"{telemetry.share:.1%}", f"{telemetry.speed:,.0f}" if telemetry.speed else "-"


def _measured(worker: WorkerSummary) -> tuple[str, ...]:
    telemetry = worker.telemetry
    if telemetry is None:
        return ("-",) * 4
    step = waiting = memory = cores = "-"
    if telemetry.step_s:
        step, waiting = f"{1000 * telemetry.step_s:.1f} ms", f"{telemetry.waiting_s / telemetry.step_s:.0%}"
    if telemetry.resident_bytes:
        memory, cores = f"{telemetry.resident_bytes / 1e6:,.0f} MB", f"{telemetry.cores:.2f}"
    return step, waiting, memory, cores


def _hosts(hosts: Iterable[HostStatus]) -> list[str]:
    rows = [("host", "slots", "workers", "state")]
    rows += [(each.host, str(each.slots), str(each.workers), _host_state(each)) for each in hosts]
    return _table(rows)


def _host_state(host: HostStatus) -> str:
    if host.is_drained:
        return "drained" if host.workers == 0 else "is being drained"
    if host.out_for_s:
        how_long = "permanently" if host.out_for_s < 0 else f"for {host.out_for_s:.0f} s more"
        return f"excluded {how_long}, after {count(host.failures, 'failure')}"
    return "in use" if host.is_connected else "no agent"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _ago(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"
