"""What a job of thousands of workers costs its coordinator's process: the real one, over TCP on this machine.

python -m benchmarks.coordinator_server --workers 64 512 4096

One process is the coordinator, with all that it does for each message; another one plays the agents and their workers
(benchmarks/simulated_agents.py). The CPU time is that of the coordinator's process.

start     from the first agent to START of generation 1
told      one worker is killed: from then until START of the next generation is told to all
back      from there until its replacement trains with the others
idle      heartbeats of all agents, for a second, while all workers make steps; `quiet`: while their steps take long
status    one answer to `farandole status`, encoded
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import sys
import time

from farandole.base.config import JobConfig
from farandole.base.events.event import Event
from farandole.base.events.generation_events import GenerationStarted, Recovered
from farandole.base.events.host_events import AgentWasLost
from farandole.base.wire.frames import encode
from farandole.base.wire.messages import Welcome
from farandole.job.coordinator.server import Coordinator, CoordinatorSetup

SLOTS = 8
"""Workers on each host."""

_DEADLINE_S = 300.0


class Watch:
    """The awaited events of the coordinator, and its process's CPU time when they came."""

    def __init__(self) -> None:
        self._events: list[tuple[Event, float, float]] = []

    def on_event(self, event: Event) -> None:
        event.line()
        if isinstance(event, GenerationStarted | Recovered):
            self._events.append((event, time.process_time(), time.monotonic()))
        elif isinstance(event, AgentWasLost):
            print(event.line(), flush=True)

    async def until(self, kind: type[Event], times: int) -> tuple[float, float]:
        """Wait until so many events of a kind have come; return CPU time and time then."""
        async with asyncio.timeout(_DEADLINE_S):
            while True:
                found = [(cpu_s, at_s) for event, cpu_s, at_s in self._events if isinstance(event, kind)]
                if len(found) >= times:
                    return found[times - 1]
                await asyncio.sleep(0.05)


async def measure(workers: int, idle_s: float, budget_s: float, seed: int) -> None:
    """Run one job of this size, and print its costs."""
    watch, token, hosts = Watch(), secrets.token_bytes(32), -(-workers // SLOTS)
    config = JobConfig(hosts * SLOTS, takes_agents=True, start_timeout_s=_DEADLINE_S, detection_budget_s=budget_s)
    welcome = Welcome("job", ("true",), ".", {}, config.detection_budget_s, config.grace_s, is_elastic=True)
    coordinator = Coordinator(CoordinatorSetup(config, token, "job", welcome=welcome), on_event=watch.on_event)
    await coordinator.start()
    run = asyncio.create_task(coordinator.run())
    words = [str(coordinator.address.port), token.hex(), str(hosts), str(SLOTS), str(seed)]
    fleet = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.simulated_agents", *words, stdin=asyncio.subprocess.PIPE
    )
    assert fleet.stdin is not None
    try:
        begin_cpu_s, begin_s = time.process_time(), time.monotonic()
        cpu_s, at_s = await watch.until(GenerationStarted, 1)
        _print("start", workers, cpu_s - begin_cpu_s, at_s - begin_s)
        await asyncio.sleep(2.0)
        begin_cpu_s, begin_s = time.process_time(), time.monotonic()
        fleet.stdin.write(f"kill w{workers // 2}\n".encode())
        told_cpu_s, told_s = await watch.until(GenerationStarted, 2)
        _print("told", workers, told_cpu_s - begin_cpu_s, told_s - begin_s)
        cpu_s, at_s = await watch.until(Recovered, 2)
        _print("back", workers, cpu_s - told_cpu_s, at_s - told_s)
        for name, order in (("idle", "train"), ("quiet", "pause")):
            fleet.stdin.write(f"{order}\n".encode())
            await asyncio.sleep(2.0)
            begin_cpu_s, begin_s = time.process_time(), time.monotonic()
            await asyncio.sleep(idle_s)
            took_s = time.monotonic() - begin_s
            _print(name, workers, (time.process_time() - begin_cpu_s) / took_s, 1.0)
        begin_cpu_s = time.process_time()
        encode(coordinator.clients.status())
        _print("status", workers, time.process_time() - begin_cpu_s, 0.0)
    finally:
        run.cancel()
        with contextlib.suppress(ProcessLookupError):
            fleet.kill()
        await fleet.wait()


def _print(phase: str, workers: int, cpu_s: float, took_s: float) -> None:
    print(f"{phase:7} {workers:7} {cpu_s:8.3f} {took_s:8.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--idle", type=float, default=10.0, metavar="SECONDS", help="how long idleness is measured")
    parser.add_argument("--detection-budget", type=float, default=3.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print("phase   workers    CPU s   took s")
    for workers in options.workers:
        asyncio.run(measure(workers, options.idle, options.detection_budget, options.seed))


if __name__ == "__main__":
    main()
