"""`farandole status`, `jobs`, `scale`, `drain` and `undrain`: requests to a running job. Used by cli.py."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from farandole.clock import wall_time_s
from farandole.control import Accepted, AskDrain, AskScale, AskUndrain, ClientMessage, Status, is_drained, is_scaled
from farandole.errors import AuthenticationError, ConfigError, ProtocolError
from farandole.launch.client import Client, NoAnswer
from farandole.launch.control_parser import control_parser
from farandole.launch.job_files import JobFile, running
from farandole.launch.run_parser import USAGE_ERROR
from farandole.launch.status_text import in_words
from farandole.launch.token_file import read_token_file
from farandole.membership import Address

DONE, NOT_DONE = 0, 1


class Contact(NamedTuple):
    """The contact of a job: the address of its coordinator, its token, and its id; None: any job there. `name` is the
    job's name in an answer."""

    address: Address
    token: bytes
    job: str | None
    name: str

    @classmethod
    def of(cls, file: JobFile) -> Contact:
        return cls(file.coordinator, file.token, file.job, f"job {file.job} ({' '.join(file.command)})")


def control_command(command: str, arguments: Sequence[str]) -> int:
    """Run a command. Return DONE; NOT_DONE when the job refused, does not answer, or did not finish in time;
    USAGE_ERROR where it is not clear which job is meant. Raises SystemExit as argparse does."""
    options = control_parser(command).parse_args(arguments)
    try:
        if command == "jobs":
            return _jobs(options.json)
        if command == "status" and not (options.job or options.address) and len(running()) != 1:
            if options.json:  # always one job's status, or nothing
                return _say_error(command, _not_one(running()), NOT_DONE)
            return _jobs(as_json=False)
        return asyncio.run(_ask(command, options, _chosen(options)))
    except ConfigError as error:
        return _say_error(command, error, USAGE_ERROR)
    except (NoAnswer, AuthenticationError, ProtocolError) as error:
        return _say_error(command, error, NOT_DONE)


async def _ask(command: str, options: argparse.Namespace, job: Contact) -> int:
    client = await Client.dial(job.address, job.token, job.job)
    try:
        if command == "status":
            status = await client.status()
            print(msgspec.json.encode(status).decode() if options.json else "\n".join(in_words(status)))
            return DONE
        request, is_done = _request(command, options)
        answer = await client.ask(request)
        if not isinstance(answer, Accepted):
            reason = getattr(answer, "reason", "the answer makes no sense")
            return _say_error(command, f"{job.name}: {reason}", NOT_DONE)
        print(f"{job.name}: {answer.what}")
        if is_done is not None and options.wait:
            status = await client.wait_until(is_done, options.timeout)
            print(f"done: generation {status.generation} has {len(status.members)} workers")
        return DONE
    finally:
        client.close()


def _request(command: str, options: argparse.Namespace) -> tuple[ClientMessage, Callable[[Status], bool] | None]:
    """Return the message to the coordinator, and the condition on its status that shows completion, where that takes a
    while."""
    if command == "scale":
        return AskScale(options.size), partial(is_scaled, size=options.size)
    if command == "drain":
        return AskDrain(options.host), partial(is_drained, host=options.host)
    return AskUndrain(options.host), None


def _chosen(options: argparse.Namespace) -> Contact:
    """Return the chosen job. Raises ConfigError when the choice is not clear."""
    if options.address or options.token_file:
        if options.job:
            raise ConfigError("--job chooses among the jobs of this machine; leave it out with --address")
        return _elsewhere(options)
    jobs = running()
    if options.job:
        found = [job for job in jobs if job.job.startswith(options.job)]
        if len(found) != 1:
            what = "more than one job begins" if found else "no job of this user runs here whose name begins"
            raise ConfigError(f"{what} with {options.job}; {_which(jobs)}")
        return Contact.of(found[0])
    if not jobs:
        raise ConfigError("no job of this user runs here; start one with: farandole run")
    if len(jobs) > 1:
        raise ConfigError(f"{len(jobs)} jobs run here; say which with --job. {_which(jobs)}")
    return Contact.of(jobs[0])


def _elsewhere(options: argparse.Namespace) -> Contact:
    if options.token_file is None or options.address is None:
        raise ConfigError(
            "a job on another machine needs both: --address HOST:PORT, and --token-file with a copy of the file that "
            "its `farandole run --token-file` was given"
        )
    host, _, port = options.address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--address must be HOST:PORT, got {options.address!r}")
    address = Address(host.strip("[]"), int(port))
    return Contact(address, read_token_file(options.token_file), None, f"the job at {address}")


def _jobs(as_json: bool) -> int:
    jobs = running()
    if as_json:
        print(msgspec.json.encode([_without_token(job) for job in jobs]).decode())
    else:
        print("\n".join(_line(job) for job in jobs) if jobs else "no job of this user runs here")
    return DONE


def _not_one(jobs: Sequence[JobFile]) -> str:
    return f"--json tells of one job, say which with --job (farandole jobs --json lists them); {_which(jobs)}"


def _which(jobs: Sequence[JobFile]) -> str:
    return "there are none" if not jobs else "there are:\n" + "\n".join(f"  {_line(job)}" for job in jobs)


def _line(job: JobFile) -> str:
    for_s = max(0.0, wall_time_s() - job.started_s)
    return f"{job.job}  pid {job.pid}  for {for_s:.0f} s  at {job.coordinator}  {' '.join(job.command)}"


def _without_token(job: JobFile) -> dict[str, object]:
    return {
        "job": job.job,
        "pid": job.pid,
        "coordinator": str(job.coordinator),
        "command": job.command,
        "started_s": job.started_s,
    }


def _say_error(command: str, error: object, code: int) -> int:
    print(f"farandole {command}: {error}", file=sys.stderr)
    return code
