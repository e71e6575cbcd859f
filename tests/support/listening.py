"""A listener for tests, on a free port of this machine."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from farandole.base.wire.listening import FailureBudget, Listener
from farandole.base.wire.sockets import listening_sockets


def listening(on_connection: Callable[[socket.socket], Coroutine[Any, Any, None]]) -> Listener:
    """Runs a task for each connection."""
    tasks: set[asyncio.Task[None]] = set()

    def start(connected: socket.socket, _: str) -> None:
        tasks.add(task := asyncio.get_running_loop().create_task(on_connection(connected)))
        task.add_done_callback(tasks.discard)

    listener = Listener(start, FailureBudget())
    listener.open(listening_sockets(["127.0.0.1"]))
    return listener
