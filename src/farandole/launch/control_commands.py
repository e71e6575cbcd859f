"""`farandole status`, `top`, `events`, `jobs`, `scale`, `drain` and `undrain`: requests to a running job, and the
answers as text."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from farandole.errors import AuthenticationError, ConfigError, FatalError, ProtocolError
from farandole.launch.consent import NoConsent, require_consent
from farandole.launch.control_parser import control_parser
from farandole.launch.job_files import JobFile, is_alive, read_job_file, running
from farandole.launch.joining import read_token_file, tls_folder
from farandole.launch.run_parser import USAGE_ERROR
from farandole.machine import local_time, now_s, wall_time_s
from farandole.membership import Address
from farandole.wire.channel import TO_CLIENT, Channel, connect
from farandole.wire.control import (
    Accepted,
    AskDrain,
    AskScale,
    AskStatus,
    AskUndrain,
    ClientHello,
    ClientMessage,
    EventRecord,
    HostStatus,
    Status,
    Subscribe,
    ToClient,
    WorkerSummary,
    is_drained,
    is_scaled,
)
from farandole.wire.encryption import Certificates, load_certificates
from farandole.wire.messages import PROTOCOL_VERSION

DONE, NOT_DONE = 0, 1


class Contact(NamedTuple):
    """The contact of a job: the addresses of its coordinator, its token, and its id; None: any job there. `name` is the
    job's name in an answer, `tls` the folder of its certificates, `local` its file if it runs on this machine."""

    addresses: tuple[Address, ...]
    token: bytes
    job: str | None
    name: str
    tls: str = ""
    local: JobFile | None = None

    @classmethod
    def of(cls, file: JobFile, tls: Path | None = None) -> Contact:
        """Return the contact in a job file. `tls`: a copy of the folder that the file names."""
        name = f"job {file.job} ({' '.join(file.command)})"
        return cls(file.addresses or (file.coordinator,), file.token, file.job, name, tls_folder(tls) or file.tls)


def control_command(command: str, arguments: Sequence[str]) -> int:
    """Run a command. Return DONE; NOT_DONE when the job refused, does not answer, or did not finish in time;
    USAGE_ERROR where it is not clear which job is meant. Raises SystemExit as argparse does."""
    options = control_parser(command).parse_args(arguments)
    try:
        if command == "jobs":
            return _jobs(options.json)
        is_chosen = options.job or options.address or options.job_file if command != "jobs" else False
        if command == "status" and not is_chosen and len(running()) != 1:
            if options.json:  # always one job's status, or nothing
                return _print_error(command, _not_one(running()), NOT_DONE)
            return _jobs(as_json=False)
        if command == "scale" and not options.yes:
            require_consent(options.job_file, f"scale it to {options.size} workers")
        return asyncio.run(_ask(command, options, chosen_job(options)))
    except ConfigError as error:
        return _print_error(command, error, USAGE_ERROR)
    except (NoAnswer, NoConsent, AuthenticationError, ProtocolError) as error:
        return _print_error(command, error, NOT_DONE)


async def _ask(command: str, options: argparse.Namespace, job: Contact) -> int:
    client = await Client.dial_any(job.addresses, job.token, job.job, load_certificates(job.tls))
    if job.local is not None:
        client.is_over = partial(_is_over, job.local)
    try:
        if command in ("status", "top", "events"):
            await {"status": _show_status, "top": _show_top, "events": _print_events}[command](client, options)
            return DONE
        request, is_done = _request(command, options)
        answer = await client.ask(request)
        if not isinstance(answer, Accepted):
            reason = getattr(answer, "reason", f"unexpected answer {type(answer).__name__}")
            return _print_error(command, f"{job.name}: {reason}", NOT_DONE)
        print(f"{job.name}: {answer.what}")
        if is_done is not None and options.wait:
            status = await client.wait_until(is_done, options.timeout)
            print(f"done: generation {status.generation} has {len(status.members)} workers")
        return DONE
    finally:
        client.close()


def _is_over(local: JobFile) -> bool:
    return not is_alive(local)


async def _show_status(client: Client, options: argparse.Namespace) -> None:
    await _show(client, options.json, options.watch)


async def _show_top(client: Client, options: argparse.Namespace) -> None:
    await _show(client, as_json=False, every_s=options.every)


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


async def _show(client: Client, as_json: bool, every_s: float | None) -> None:
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


_CLEARED = "\x1b[H\x1b[2J"  # the cursor is at the top of an empty screen: ECMA-48, CUP and ED


def _request(command: str, options: argparse.Namespace) -> tuple[ClientMessage, Callable[[Status], bool] | None]:
    """Return the message to the coordinator, and the condition on its status that shows completion, where that takes a
    while."""
    if command == "scale":
        return AskScale(options.size), partial(is_scaled, size=options.size)
    if command == "drain":
        return AskDrain(options.host), partial(is_drained, host=options.host)
    return AskUndrain(options.host), None


def chosen_job(options: argparse.Namespace) -> Contact:
    """Return the chosen job. Raises ConfigError when the choice is not clear."""
    if options.job_file:
        if options.job or options.address or options.token_file:
            raise ConfigError("--job-file tells which job is meant; leave out --job, --address and --token-file")
        return Contact.of(read_job_file(options.job_file), options.tls)
    if options.address or options.token_file:
        if options.job:
            raise ConfigError("--job selects a job of this machine; leave it out with --address")
        return _elsewhere(options)
    jobs = running()
    if options.job:
        found = [job for job in jobs if job.job.startswith(options.job)]
        if len(found) != 1:
            what = "more than one job begins" if found else "no job of this user runs here whose name begins"
            raise ConfigError(f"{what} with {options.job}; {_which(jobs)}")
        return Contact.of(found[0])._replace(local=found[0])
    if not jobs:
        raise ConfigError("no job of this user runs here; start one with: farandole run")
    if len(jobs) > 1:
        raise ConfigError(f"{len(jobs)} jobs run here; select one with --job. {_which(jobs)}")
    return Contact.of(jobs[0])._replace(local=jobs[0])


def _elsewhere(options: argparse.Namespace) -> Contact:
    if options.token_file is None or options.address is None:
        raise ConfigError(
            "a job on another machine needs both: --address HOST:PORT, and --token-file with a copy of the token file "
            "of its `farandole run`"
        )
    host, _, port = options.address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--address must be HOST:PORT, got {options.address!r}")
    address = Address(host.strip("[]"), int(port))
    token = read_token_file(options.token_file)
    return Contact((address,), token, None, f"the job at {address}", tls_folder(options.tls))


def _jobs(as_json: bool) -> int:
    jobs = running()
    if as_json:
        print(msgspec.json.encode([_without_token(job) for job in jobs]).decode())
    else:
        print("\n".join(_line(job) for job in jobs) if jobs else "no job of this user runs here")
    return DONE


def _not_one(jobs: Sequence[JobFile]) -> str:
    return f"--json shows one job, select it with --job (farandole jobs --json lists all jobs); {_which(jobs)}"


def _which(jobs: Sequence[JobFile]) -> str:
    return "no jobs run" if not jobs else "running jobs:\n" + "\n".join(f"  {_line(job)}" for job in jobs)


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


def _print_error(command: str, error: object, code: int) -> int:
    print(f"farandole {command}: {error}", file=sys.stderr)
    return code


# A command's connection to the coordinator of a running job -----------------------------------------------------------

ANSWER_S = 10.0
"""Seconds within which a coordinator must answer; it is busy for milliseconds at most."""

_LOOK_S = 0.1
_ADDRESS_S = 3.0
_RETURN_S = 6.0  # for the next coordinator, when the one that was asked has died


class NoAnswer(FatalError):
    """The coordinator does not answer, or does not any more."""


class JobEnded(NoAnswer):
    """The coordinator has answered before, and no other one has taken its place."""


class Client:
    """A connection made by `dial`, to be closed. Every call raises NoAnswer when there is no answer, and
    AuthenticationError or ProtocolError when the process that listens there does not know the token, or violates the
    protocol."""

    def __init__(self, channel: Channel[ToClient], redial: Callable[[], Awaitable[Channel[ToClient]]]) -> None:
        self._channel, self._redial = channel, redial
        self.is_over: Callable[[], bool] = lambda: False
        """True when no other coordinator can follow; replace it where that can be known."""

    @classmethod
    async def dial(cls, address: Address, token: bytes, job: str | None, tls: Certificates | None = None) -> Client:
        """Connect, with a proof of the token by both ends."""

        async def redial() -> Channel[ToClient]:
            channel = await connect(address.host, address.port, token, job, TO_CLIENT, tls)
            channel.send(ClientHello(PROTOCOL_VERSION))
            return channel

        try:
            return cls(await redial(), redial)
        except OSError as error:
            raise NoAnswer(f"no job with this token answers at {address}: {error}") from None

    @classmethod
    async def dial_any(
        cls, addresses: Sequence[Address], token: bytes, job: str | None, tls: Certificates | None = None
    ) -> Client:
        """Connect to the first of these addresses that answers; of several, each has some seconds."""
        for address in addresses[:-1]:
            with contextlib.suppress(NoAnswer, TimeoutError):
                async with asyncio.timeout(_ADDRESS_S):
                    return await cls.dial(address, token, job, tls)
        return await cls.dial(addresses[-1], token, job, tls)

    async def ask(self, request: ClientMessage) -> ToClient:
        """Return the answer to one request. It may be sent to one coordinator, and again to the next one: all requests
        are for a state of the job, not for a change of it."""
        try:
            async with asyncio.timeout(ANSWER_S):
                while True:
                    try:
                        self._channel.send(request)
                        return await self._channel.receive()
                    except ConnectionError:
                        await self._return()
        except TimeoutError:
            raise NoAnswer(f"the coordinator did not answer within {ANSWER_S:g} s") from None

    async def _return(self) -> None:
        """Connect again: the job has ended, or its coordinator has died and the next one is starting."""
        self._channel.close()
        deadline_s = now_s() + _RETURN_S
        while now_s() < deadline_s and not self.is_over():
            with contextlib.suppress(OSError):
                self._channel = await self._redial()
                return
            await asyncio.sleep(_LOOK_S)
        raise JobEnded("the job has ended")

    async def status(self) -> Status:
        answer = await self.ask(AskStatus())
        if not isinstance(answer, Status):
            raise NoAnswer(f"the coordinator answered {type(answer).__name__} to a request for the status")
        return answer

    async def events(self, follow: bool) -> AsyncIterator[EventRecord]:
        """Yield the events that the coordinator still has, the oldest first; with `follow` then each new one, also
        those of the next coordinator, until the one that ends the job. Raises JobEnded where that one was missed."""
        epoch = number = 0
        while True:
            try:
                self._channel.send(Subscribe(epoch, number))
                self._channel.send(AskStatus())  # its answer comes after all events that there are
                while True:
                    async with asyncio.timeout(None if follow else ANSWER_S):
                        message = await self._channel.receive()
                    if isinstance(message, EventRecord):
                        epoch, number = message.epoch, message.number
                        yield message
                        if message.fields["event"] == "JobEnds":
                            return
                    elif not follow:
                        return
            except ConnectionError:
                await self._return()
            except TimeoutError:
                raise NoAnswer(f"the coordinator did not answer within {ANSWER_S:g} s") from None

    async def wait_until(self, condition: Callable[[Status], bool], timeout_s: float) -> Status:
        """Return the first status that fulfils the condition. Raises NoAnswer after `timeout_s` seconds, or when the
        job ends."""
        deadline_s = now_s() + timeout_s
        while not condition(status := await self.status()):
            if now_s() >= deadline_s:
                raise NoAnswer(f"the request is not completed after {timeout_s:g} s; the job still completes it")
            await asyncio.sleep(_LOOK_S)
        return status

    def close(self) -> None:
        self._channel.close()


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
        lines.append(
            f"waiting for {missing} more slot{'' if missing == 1 else 's'} ({there} of {status.wanted} are available)"
        )
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
    parts += _epoch(status.members)
    most = "" if status.max_np is None else f", at most {status.max_np}"
    parts.append(f"{len(status.members)} of {status.wanted} workers (at least {status.min_np}{most})")
    if status.spares:
        waiting = sum(each.state == "waits" for each in status.newcomers)
        parts.append(f"{waiting} of {status.spares} spares wait")
    parts.append(f"{status.regroups} regroups" if status.regroups != 1 else "1 regroup")
    parts.append(f"coordinator pid {status.coordinator_pid}")
    return ", ".join(parts)


def _epoch(members: Sequence[WorkerSummary]) -> list[str]:
    """Return how much of the epoch was trained, as the furthest worker tells it; empty where no loader does."""
    seen = [each.telemetry for each in members if each.telemetry is not None and each.telemetry.samples]
    if not seen:
        return []
    newest = max(seen, key=lambda each: (each.epoch, each.trained))
    share = newest.trained / newest.samples
    return [f"epoch {newest.epoch} ({newest.trained:,} of {newest.samples:,} samples, {share:.0%})"]


def _workers(workers: Sequence[WorkerSummary]) -> list[str]:
    is_measured = any(each.telemetry is not None for each in workers)
    rows: list[tuple[str, ...]] = [("rank", "worker", "host", "slot", "pid", "state", "step", "restarts left")]
    if is_measured:
        rows[0] = (*rows[0], "step time", "of it waiting", "memory", "cores")
    for each in workers:
        rank = "-" if each.rank is None else str(each.rank)
        pid = str(each.pid) if each.pid else "-"
        step = "-" if each.step is None else str(each.step)
        row = (rank, each.worker, each.host, str(each.slot), pid, each.state, step, str(each.restarts_left))
        rows.append((*row, *(_measured(each) if is_measured else ())))
    return _table(rows)


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
        return f"excluded {how_long}, after {host.failures} failure{'' if host.failures == 1 else 's'}"
    return "in use" if host.is_connected else "no agent"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _ago(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"
