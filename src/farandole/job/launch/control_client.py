"""The connection of a command to the coordinator of a running job: which job is meant, requests and their answers,
and consent. Used by control_commands.py and page_command.py.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import pwd
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from farandole.base.machine import now_s, wall_time_s
from farandole.base.membership import Address
from farandole.base.wire.channel import Channel, connect
from farandole.base.wire.control import (
    STACKS_S,
    AskStacks,
    AskStatus,
    ClientHello,
    ClientMessage,
    EventRecord,
    StacksOfWorker,
    Status,
    Subscribe,
    ToClient,
)
from farandole.base.wire.encryption import Certificates, load_certificates
from farandole.base.wire.frames import TO_CLIENT
from farandole.errors import ConfigError, FatalError
from farandole.job.launch.job_files import JobFile, is_alive, read_job_file, running
from farandole.job.launch.joining import read_token_file, tls_folder

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
            raise ConfigError(f"{what} with {options.job}; {list_of(jobs)}")
        return Contact.of(found[0])._replace(local=found[0])
    if not jobs:
        raise ConfigError("no job of this user runs here; start one with: farandole run")
    if len(jobs) > 1:
        raise ConfigError(f"{len(jobs)} jobs run here; select one with --job. {list_of(jobs)}")
    return Contact.of(jobs[0])._replace(local=jobs[0])


def _elsewhere(options: argparse.Namespace) -> Contact:
    if options.token_file is None or options.address is None:
        raise ConfigError(
            "a job on another machine needs both: --address HOST:PORT, and --token-file with a copy of the token file "
            "of its `farandole run`"
        )
    address = Address.parse(options.address)
    if address is None:
        raise ConfigError(f"--address must be HOST:PORT, got {options.address!r}")
    token = read_token_file(options.token_file)
    return Contact((address,), token, None, f"the job at {address}", tls_folder(options.tls))


def list_of(jobs: Sequence[JobFile]) -> str:
    """Return these jobs as the end of an error message."""
    return "no jobs run" if not jobs else "running jobs:\n" + "\n".join(f"  {line_of(job)}" for job in jobs)


def line_of(job: JobFile) -> str:
    """Return a line about a job that runs on this machine."""
    for_s = max(0.0, wall_time_s() - job.started_s)
    return f"{job.job}  launcher {job.pid}  for {for_s:.0f} s  at {job.coordinator}  {' '.join(job.command)}"


# A command's connection to the coordinator of a running job -----------------------------------------------------------

ANSWER_S = 10.0
"""Seconds within which a coordinator must answer; it is busy for milliseconds at most."""

_LOOK_S = 0.1
_ADDRESS_S = 3.0
_STACKS_AT_ONCE = 32
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
            channel.send(ClientHello())
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

    async def stacks(self, workers: Sequence[str]) -> AsyncIterator[StacksOfWorker]:
        """Yield the stacks of each of these workers as they come, or why there are none."""
        left = set(workers)
        while left:
            asked = sorted(left)[:_STACKS_AT_ONCE]
            awaited = set(asked)
            try:
                self._channel.send(AskStacks(tuple(asked)))
                while awaited:
                    async with asyncio.timeout(STACKS_S + ANSWER_S):
                        message = await self._channel.receive()
                    if isinstance(message, StacksOfWorker) and message.worker in awaited:
                        awaited.discard(message.worker)
                        left.discard(message.worker)
                        yield message
            except ConnectionError:  # the next coordinator does not know of the request
                await self._return()
            except TimeoutError:
                raise NoAnswer(f"the coordinator did not answer within {STACKS_S + ANSWER_S:g} s") from None

    def close(self) -> None:
        self._channel.close()


async def connected_client(job: Contact) -> Client:
    """Return a connection to the coordinator of the job. Raises what Client.dial raises."""
    client = await Client.dial_any(job.addresses, job.token, job.job, load_certificates(job.tls))
    if job.local is not None:
        local = job.local
        client.is_over = lambda: not is_alive(local)
    return client


# Consent: who can read the job file of a colleague, such as root, should not change that job by mistake ---------------


class NoConsent(FatalError):
    """The user did not agree, or could not be asked."""


def require_consent(job_file: Path | None, change: str) -> None:
    """Ask on the terminal if the job of this file was started by another user; None: a job of this user on this
    machine. `change`: what would be done, as in "scale it to 3 workers". Raises NoConsent if the answer is not yes, and
    without a terminal."""
    owner = None if job_file is None else _other_owner(job_file)
    if owner is None:
        return
    whose = f"{job_file} is the file of a job of {owner}, and you are {_name(os.getuid())}"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise NoConsent(f"{whose}: to {change}, add --yes")
    print(f"{whose}. {change.capitalize()}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise NoConsent("nothing was changed")


def _other_owner(path: Path) -> str | None:
    """Return the name of the file's owner; None if that is this user, or if there is no such file."""
    try:
        owner = path.stat().st_uid
    except OSError:
        return None
    return None if owner == os.getuid() else _name(owner)


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"
