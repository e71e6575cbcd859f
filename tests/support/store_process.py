"""A store of ours in a process of its own, for torch's clients: some of their calls hold the interpreter's lock while
they wait for an answer.

    python -m tests.support.store_process     prints the port, serves until stdin is closed, then prints its log lines
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from types import TracebackType

from farandole.base.events.event import Event
from farandole.job.coordinator.store_server import StoreServer


class StoreProcess:
    """`with StoreProcess() as store:` serves at `store.port` of 127.0.0.1."""

    def __enter__(self) -> StoreProcess:
        command = [sys.executable, "-m", "tests.support.store_process"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.log = self._process.communicate(timeout=30)[0].splitlines()
        """The log lines of connections that were refused."""


async def _serve() -> None:
    events: list[Event] = []
    store, loop = StoreServer(events.append), asyncio.get_running_loop()
    await store.open("127.0.0.1")
    print(store.address.port, flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    store.close()
    for event in events:
        print(event.line())


if __name__ == "__main__":
    asyncio.run(_serve())
