"""Faults that a worker can only cause in itself, on request. bringing.py sends the request; scripts call this."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import threading
from pathlib import Path

STARVED_BYTES = 256 << 20
HOLD_S = 1


class Orders:
    """Receives orders. Create it first of all in a script: a worker that may be killed during its start has to be known
    from then on.

    It creates an empty file worker-PID-HOST.jsonl in `folder`, for records (step_records.py), and a named pipe
    order-PID-HOST, which is read in a separate thread.
    """

    def __init__(self, folder: str | Path) -> None:
        who = f"{os.getpid()}-{socket.gethostname()}"
        self._raise, self._hang = threading.Event(), threading.Event()
        self._pipe = Path(folder) / f"order-{who}"
        os.mkfifo(self._pipe)
        threading.Thread(target=self._obey, name="orders", daemon=True).start()
        (Path(folder) / f"worker-{who}.jsonl").touch()

    def check(self) -> None:
        """Execute an order; call it in each step. Raises RuntimeError, or never returns, when ordered to."""
        if self._hang.is_set():
            threading.Event().wait()
        if self._raise.is_set():
            self._raise.clear()
            raise RuntimeError("this worker was told to raise an exception")

    def _obey(self) -> None:
        while True:
            order = self._pipe.read_text()  # one writer, one order
            if order == "exit":
                os._exit(0)
            elif order == "raise":
                self._raise.set()
            elif order == "hang":
                self._hang.set()
            elif order == "hold":
                ctypes.PyDLL(None).sleep(HOLD_S)  # it keeps the GIL, as few functions do
            elif order == "starve":
                wanted = bytearray(STARVED_BYTES)
                del wanted  # memory was not short after all


def give(folder: Path, pid: int, host: str, order: str) -> None:
    """Send an order to the worker with this process id on this host. Raises ProcessLookupError when it is gone."""
    try:
        pipe = os.open(folder / f"order-{pid}-{host}", os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ENXIO:  # without a reader
            raise
        raise ProcessLookupError(f"there is no worker {pid} on {host}") from error
    try:
        os.write(pipe, order.encode())
    finally:
        os.close(pipe)
