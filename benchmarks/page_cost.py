"""What the page of a job costs: its process, and the coordinator's, with open pages and a scrape each second.

python -m benchmarks.page_cost --workers 64 --pages 20

The coordinator is a real one in this process; another process plays agents and workers (simulated_agents.py), a third
one is `farandole page`, a fourth one reads its feeds as browsers do. CPU time of one core, in percent:

coordinator   of the coordinator's process
page          of the page's process
soon          milliseconds from an event until the last one of the pages has it

observation_cost.py measures what open pages cost the workers of a real job.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import selectors
import socket
import statistics
import sys
import tempfile
import time
import urllib.parse
from pathlib import Path

import psutil

from benchmarks.coordinator_server import SLOTS, Watch
from farandole.base.config import JobConfig
from farandole.base.events.generation_events import GenerationStarted
from farandole.base.events.host_events import HostUndrained
from farandole.base.wire.authentication import new_token
from farandole.base.wire.messages import Welcome
from farandole.job.coordinator.server import Coordinator, CoordinatorSetup

_DEADLINE_S = 300.0
_EVENTS = 20


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """Run one job, and print the costs without a page, with one that nobody has opened, and with open ones."""
    watch, token, hosts = Watch(), new_token(), -(-options.workers // SLOTS)
    token_file = folder / "token"
    token_file.touch(mode=0o600)
    token_file.write_bytes(token)
    config = JobConfig(hosts * SLOTS, takes_agents=True, start_timeout_s=_DEADLINE_S)
    welcome = Welcome("job", ("true",), ".", {}, config.detection_budget_s, config.grace_s, is_elastic=True)
    coordinator = Coordinator(CoordinatorSetup(config, token, "job", welcome=welcome), on_event=watch.on_event)
    await coordinator.start()
    run = asyncio.create_task(coordinator.run())
    address = str(coordinator.address)
    words = [str(coordinator.address.port), token.hex(), str(hosts), str(SLOTS), "1"]
    async with contextlib.AsyncExitStack() as processes:
        await _started(processes, "benchmarks.simulated_agents", *words)
        await watch.until(GenerationStarted, 1)
        await asyncio.sleep(3.0)
        print("pages  coordinator %  page %")
        await _print_cost("none", None, options.seconds)
        selection = ("--address", address, "--token-file", str(token_file))
        page = await _started(processes, "farandole", "page", "--listen", "127.0.0.1:0", *selection)
        assert page.stdout is not None
        found = re.search(r"http://\S+?/", (await page.stdout.readline()).decode())
        assert found is not None
        await asyncio.sleep(2.0)
        await _print_cost("0", page.pid, options.seconds)
        readers = await _started(processes, "benchmarks.page_cost", "--read", found[0], "--pages", str(options.pages))
        assert readers.stdout is not None
        await readers.stdout.readline()
        await asyncio.sleep(2.0)
        await _print_cost(str(options.pages), page.pid, options.seconds)
        late_ms = []
        for number in range(_EVENTS):
            began_s = time.time()
            coordinator.remember(HostUndrained(f"host{number}"))
            late_ms.append(1e3 * (float(await readers.stdout.readline()) - began_s))
            await asyncio.sleep(0.2)
        print(f"soon: median {statistics.median(late_ms):.1f} ms, longest {max(late_ms):.1f} ms")
        run.cancel()


async def _started(processes: contextlib.AsyncExitStack, module: str, *words: str) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )

    async def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    processes.push_async_callback(end)
    return process


async def _print_cost(pages: str, pid: int | None, seconds: float) -> None:
    page = None if pid is None else psutil.Process(pid)
    before, page_before, began_s = time.process_time(), _cpu_s(page), time.monotonic()
    await asyncio.sleep(seconds)
    took_s = time.monotonic() - began_s
    own, its = (time.process_time() - before) / took_s, (_cpu_s(page) - page_before) / took_s
    print(f"{pages:>5} {100 * own:14.2f} {100 * its:7.2f}", flush=True)


def _cpu_s(process: psutil.Process | None) -> float:
    return 0.0 if process is None else sum(process.cpu_times()[:2])


def _read(url: str, pages: int) -> None:
    """Follow the feed as so many browsers, and ask for metrics each second. Prints "ready", then for each event the
    time at which the last one of the pages has it.

    The browsers are on other machines, in truth, so this reads with as little work as it can, when others leave time
    for it.
    """
    os.nice(19)
    target = urllib.parse.urlsplit(url)
    assert target.hostname is not None
    assert target.port is not None
    host = (target.hostname, target.port)
    selector, unread = selectors.DefaultSelector(), dict[socket.socket, bytes]()
    for _ in range(pages):
        feed = socket.create_connection(host)
        feed.sendall(f"GET {target.path}feed HTTP/1.0\r\nHost: {target.netloc}\r\n\r\n".encode())
        unread[feed] = feed.recv(1 << 16)
        selector.register(feed, selectors.EVENT_READ)
    print("ready", flush=True)
    seen: dict[str, int] = {}
    scrape_s = time.monotonic()
    metrics = socket.create_connection(host)  # one for all scrapes, as Prometheus has it
    while True:
        if time.monotonic() >= scrape_s:
            scrape_s += 1.0
            metrics.sendall(f"GET {target.path}metrics HTTP/1.1\r\nHost: {target.netloc}\r\n\r\n".encode())
            _receive_response(metrics)
        for key, _ in selector.select(max(0.0, scrape_s - time.monotonic())):
            ready = key.fileobj
            assert isinstance(ready, socket.socket)
            if not (data := ready.recv(1 << 16)):
                raise ConnectionError("the page has closed a feed")
            *messages, unread[ready] = (unread[ready] + data).split(b"\n\n")
            for message in messages:
                if message.startswith(b"event: event\n"):
                    number = json.loads(message.partition(b"data: ")[2])["event"]["id"]
                    seen[number] = seen.get(number, 0) + 1
                    if seen[number] == pages:
                        print(time.time(), flush=True)


def _receive_response(connection: socket.socket) -> None:
    """Receive a response of HTTP/1.1 to its end."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += _received(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\ncontent-length: *(\d+)", head)
    assert head.startswith(b"HTTP/1.1 200"), head
    assert length is not None, head
    received = len(body)
    while received < int(length[1]):
        received += len(_received(connection))


def _received(connection: socket.socket) -> bytes:
    if not (data := connection.recv(1 << 16)):
        raise ConnectionError("the page has closed a connection in the middle of a response")
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--pages", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--read", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        _read(options.read, options.pages)
        return
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(options, Path(folder)))


if __name__ == "__main__":
    main()
