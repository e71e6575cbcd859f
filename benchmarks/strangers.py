"""What strangers cost a job: many connections at once at each of its TCP ports, which say nothing or garbage and dial
again a second after they were hung up on.

python -m benchmarks.strangers                  # 1,000 at each port
python -m benchmarks.strangers --tls            # of a job with TLS

The strangers need CPU time themselves. So they connect in turns to the job, and to as many ports of a process that has
nothing to do with it and treats them in the same way.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

_SETTLE_S = 3.0
_PAUSE_S = 1.0
_HUNG_UP_AFTER_S = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strangers", type=int, default=1000, help="at each port")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=5.0, help="of a turn, beside the first ones")
    parser.add_argument("--model", default="mlp", help="one of benchmarks.models.TASKS")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dial", type=int, nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--listen", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if options.train:
        _train(options)
    elif options.dial:
        asyncio.run(_be_strangers(options.dial, options.strangers))
    elif options.listen:
        asyncio.run(_be_unrelated(options.listen))
    else:
        with tempfile.TemporaryDirectory() as folder:
            _measure(options, Path(folder))


def _measure(options: argparse.Namespace, folder: Path) -> None:
    flags = ["-np", "2", "--quiet", "--job-file", str(folder / "job"), "--host", "127.0.0.1"]
    if options.tls:
        subprocess.run([sys.executable, "-m", "farandole", "certificates", str(folder / "certificates")], check=True)
        flags += ["--tls", str(folder / "certificates"), "--transport", "tcp"]
    steps = folder / "steps"
    job = _start("farandole", "run", *flags, sys.executable, *_own("--train", str(steps), "--model", options.model))
    try:
        _wait_for(steps)
        ports = _ports(job.pid)
        unrelated = _start("benchmarks.strangers", "--listen", str(len(ports)), stdout=subprocess.PIPE)
        try:
            assert unrelated.stdout is not None
            others = [int(word) for word in unrelated.stdout.readline().split()]
            turns = [[_turn(options, job.pid, steps, where) for where in (others, ports)] for _ in range(options.pairs)]
        finally:
            unrelated.kill()
            unrelated.wait()
    finally:
        job.terminate()
        job.wait()
    ratios = [at_job[0] / elsewhere[0] for elsewhere, at_job in turns]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"{options.strangers} strangers at each of {len(ports)} ports, {len(ratios)} pairs of turns")
    print(f"step time, at the job's ports / elsewhere: {middle:.3f} [{low:.3f}, {high:.3f}]")
    for index, what in ((1, "launcher and coordinator"), (2, "workers")):
        shares = [statistics.median(turn[side][index] for turn in turns) for side in (1, 0)]
        print(f"CPU of {what}: {shares[0]:.1%} of a core, {shares[1]:.1%} while the strangers are elsewhere")


def _turn(options: argparse.Namespace, launcher: int, steps: Path, ports: Sequence[int]) -> tuple[float, float, float]:
    """Return the median step time in seconds, and the shares of a core that the launcher and the workers used."""
    words = ["--dial", *map(str, ports), "--strangers", str(options.strangers)]
    strangers = _start("benchmarks.strangers", *words)
    try:
        time.sleep(_SETTLE_S)
        before, began_s = _cpu_s(launcher), time.monotonic()
        time.sleep(options.seconds)
        after, ended_s = _cpu_s(launcher), time.monotonic()
    finally:
        strangers.kill()
        strangers.wait()
    records = [tuple(map(float, line.split())) for line in steps.read_text().splitlines() if line.count(" ") == 1]
    times = [took_s for at_s, took_s in records if began_s < at_s < ended_s]
    shares = [(b - a) / (ended_s - began_s) for a, b in zip(before, after, strict=True)]
    return statistics.median(times), shares[0], shares[1]


def _cpu_s(launcher: int) -> tuple[float, float]:
    """Return the CPU seconds so far of the launcher with its coordinator, and of the workers."""
    own = workers = 0.0
    for process in [psutil.Process(launcher), *psutil.Process(launcher).children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            used = sum(process.cpu_times()[:2])
            if "--train" in process.cmdline():
                workers += used if process.pid != launcher else 0.0
                own += used if process.pid == launcher else 0.0
            else:
                own += used
    return own, workers


def _ports(launcher: int) -> list[int]:
    """Return all TCP ports at which the job listens."""
    found = set()
    for process in [psutil.Process(launcher), *psutil.Process(launcher).children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {each.laddr.port for each in process.net_connections("tcp") if each.status == "LISTEN"}
    return sorted(found)


def _own(*words: str) -> list[str]:
    return ["-m", "benchmarks.strangers", *words]


def _start(module: str, *words: str, stdout: int | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", module, *words], stdout=stdout)


def _wait_for(path: Path) -> None:
    deadline_s = time.monotonic() + 120
    while not path.exists() or path.stat().st_size < 1000:
        assert time.monotonic() < deadline_s, "the job does not train"
        time.sleep(0.1)


async def _be_strangers(ports: Sequence[int], count: int) -> None:
    await asyncio.gather(*(_be_a_stranger(port, number) for number in range(count) for port in ports))


async def _be_a_stranger(port: int, number: int) -> None:
    await asyncio.sleep(_PAUSE_S * number / 1000)
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
            if number % 2:
                writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await reader.read(1024)
            writer.transport.abort()
        await asyncio.sleep(_PAUSE_S)


async def _be_unrelated(count: int) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_HUNG_UP_AFTER_S):
                await reader.read(100)
        writer.transport.abort()

    servers = [await asyncio.start_server(serve, "127.0.0.1", 0, limit=1024, backlog=1024) for _ in range(count)]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


def _train(options: argparse.Namespace) -> None:
    """Be a worker; rank 0 writes when each step has ended, and how long it took."""
    import torch

    import farandole as fd
    from benchmarks.models import TASKS

    task = TASKS[options.model]
    torch.set_num_threads(1)
    fd.init()
    model = task.build()
    optimizer: Any = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3, fused=True))
    loader = fd.elastic.DataLoader(task.data(), task.batch * fd.size(), seed=0)
    state: Any = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)

    @fd.elastic.run
    def train(state: Any) -> None:
        with options.train.open("a", buffering=1) as records:
            for _ in loader.epochs(1_000_000):
                began_s = time.monotonic()
                for x, y in loader:
                    optimizer.zero_grad()
                    task.loss(model, x, y).backward()
                    optimizer.step()
                    ended_s = time.monotonic()
                    if fd.rank() == 0:
                        records.write(f"{ended_s} {ended_s - began_s}\n")
                    began_s = ended_s

    train(state)


if __name__ == "__main__":
    main()
