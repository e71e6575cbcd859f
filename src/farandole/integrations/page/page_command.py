"""`farandole page`: serve the live page and the metrics of a running job."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from farandole.base.command_parser import USAGE_ERROR, Parser
from farandole.base.wire.channel import Channel, connect
from farandole.base.wire.control import Accepted, AskDrain, AskScale, AskUndrain, ClientHello, Declined, ToClient
from farandole.base.wire.encryption import load_certificates
from farandole.base.wire.frames import TO_CLIENT
from farandole.errors import AuthenticationError, ConfigError, ProtocolError
from farandole.job.launch.control_client import DONE, NOT_DONE, Client, Contact, NoAnswer, chosen_job
from farandole.job.launch.control_parser import add_job_selection
from farandole.job.launch.job_files import JobFile, is_alive
from farandole.job.launch.page_address import (
    DEFAULT_PORT,
    FROM_LAUNCHER,
    check_traces,
    is_loopback,
    listening,
    parse_page_address,
    url_of,
)

NICENESS = 5
"""The niceness of the page's process: workers that wait for a processor delay each step, and a page may be late by
milliseconds."""

_LAST_MESSAGES_S = 1.0


def page_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = Parser(
        prog="farandole page",
        description="Serve the live page of a running job, and its metrics for Prometheus at /metrics. It stays until "
        "Ctrl-C, also when the job has ended. Needs the extra farandole[page].",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help=f"address of the page (default: 127.0.0.1:{DEFAULT_PORT}, or the next port that is free). At an address "
        "that is not loopback everything needs the token",
    )
    parser.add_argument(
        "--print-token", action="store_true", help="print the token of the job's page, and end; also with run --page"
    )
    parser.add_argument(
        "--traces",
        nargs="?",
        const="",
        metavar="URL",
        help="export regroups and checkpoints as spans of OpenTelemetry to a collector, over HTTP (default: "
        "OTEL_EXPORTER_OTLP_ENDPOINT, or http://localhost:4318/v1/traces); needs the extra farandole[traces]",
    )
    parser.add_argument(FROM_LAUNCHER, type=int, help=argparse.SUPPRESS)
    add_job_selection(parser)
    return parser


def page_command(arguments: Sequence[str]) -> int:
    """Run the command. Return DONE; NOT_DONE when the job does not answer; USAGE_ERROR where it is not clear which job
    is meant, or the address cannot be used. Raises SystemExit as argparse does."""
    options = page_parser().parse_args(arguments)
    try:
        if options.from_launcher is not None:
            return _serve_for_launcher(options.from_launcher, options.traces)
        address = parse_page_address(options.listen)
        if options.traces is not None:
            check_traces(options.traces)
        job = chosen_job(options)
        if options.print_token:
            from farandole.integrations.page.page_server import page_token

            print(page_token(job.token))
            return DONE
        with listening(address) as sock:
            return asyncio.run(_serve_for_user(job, sock, options.traces))
    except ConfigError as error:
        print(f"farandole page: {error}", file=sys.stderr)
        return USAGE_ERROR
    except (NoAnswer, AuthenticationError, ProtocolError) as error:
        print(f"farandole page: {error}", file=sys.stderr)
        return NOT_DONE


async def _serve_for_user(job: Contact, sock: socket.socket, traces: str | None) -> int:
    from farandole.integrations.page.page_server import page_token

    client = await Client.dial_any(job.addresses, job.token, job.job, load_certificates(job.tls))
    client.close()
    print(f"{job.name}: {url_of(sock)}#token={page_token(job.token)}", flush=True)
    over = asyncio.Event()

    async def until_interrupted() -> None:
        await over.wait()
        print("the job has ended; the page stays until Ctrl-C", flush=True)
        await asyncio.get_running_loop().create_future()

    await _serve(job, sock, until_interrupted(), over.set, traces)
    return DONE


def _serve_for_launcher(descriptor: int, traces: str | None) -> int:
    """Serve until the launcher closes the other end of stdin, from which the job is read. Signals to the process group
    are for the launcher."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    file = msgspec.json.decode(sys.stdin.buffer.readline(), type=JobFile)
    job = Contact.of(file)._replace(local=file)

    async def run() -> None:
        over = asyncio.Event()

        async def until_closed() -> None:
            reader = asyncio.StreamReader()
            loop = asyncio.get_running_loop()
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
            await reader.read()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_MESSAGES_S):
                    await over.wait()

        await _serve(job, sock, until_closed(), over.set, traces)

    with socket.socket(fileno=descriptor) as sock:
        asyncio.run(run())
    return DONE


async def _serve(
    job: Contact,
    sock: socket.socket,
    until: Coroutine[None, None, None],
    on_over: Callable[[], None],
    traces: str | None = None,
) -> None:
    """Serve the page of a job; `on_over` is called when the job has ended, `until` is the end of the page, `traces` the
    address of a collector."""
    from farandole.integrations.page.job_feed import JobFeed
    from farandole.integrations.page.page_server import PageServer, page_token
    from farandole.job.launch.job_history import JobHistory

    if hasattr(os, "nice"):
        os.nice(NICENESS)
    tls = load_certificates(job.tls)

    async def dial() -> Channel[ToClient]:
        failure: ConnectionError = ConnectionError("the job has no address")
        for address in job.addresses:
            try:
                channel = await connect(address.host, address.port, job.token, job.job, TO_CLIENT, tls)
            except ConnectionError as error:
                failure = error
            else:
                channel.send(ClientHello())
                return channel
        raise failure

    async def request(asked: AskScale | AskDrain | AskUndrain) -> Accepted | Declined:
        client = await Client.dial_any(job.addresses, job.token, job.job, tls)
        try:
            answer = await client.ask(asked)
        finally:
            client.close()
        if not isinstance(answer, Accepted | Declined):
            raise NoAnswer(f"the coordinator answered {type(answer).__name__}")
        return answer

    history = JobHistory(job.job or "")
    server = PageServer(history, page_token(job.token), request, is_open=is_loopback(sock))
    spans = None
    if traces is not None:
        from farandole.integrations.page.recovery_traces import RecoveryTraces

        spans = RecoveryTraces.to_collector(traces, job.job or job.name)

    def publish(kind: str, data: dict[str, Any]) -> None:
        server.feed.publish(kind, data)
        if spans is not None:
            spans.on_message(kind, data)

    def is_over() -> bool:
        return job.local is not None and not is_alive(job.local)

    await server.start([sock])
    following = asyncio.create_task(JobFeed(history, dial, publish, is_over).run())
    following.add_done_callback(lambda _: on_over())
    waiting = asyncio.create_task(until)
    try:
        await asyncio.wait((following, waiting), return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            following.result()
        await waiting
    finally:
        following.cancel()
        waiting.cancel()
        await server.stop()
        if spans is not None:
            await asyncio.to_thread(spans.close)
