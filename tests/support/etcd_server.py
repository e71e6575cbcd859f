"""An etcd of one member on loopback."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

INSTALLED = shutil.which("etcd") is not None
_DEADLINE_S = 20.0


class EtcdServer:
    """Runs inside a `with`; its data is in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port, self._peers = _free_port(), _free_port()
        self._start()

    def _start(self) -> None:
        own, peers = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self._peers}"
        command = ["etcd", "--data-dir", str(self._folder / "etcd"), "--listen-client-urls", own]
        command += [
            "--advertise-client-urls",
            own,
            "--listen-peer-urls",
            peers,
            "--initial-cluster",
            f"default={peers}",
        ]
        command += ["--initial-advertise-peer-urls", peers]
        with (self._folder / "etcd.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline_s = time.monotonic() + _DEADLINE_S
        while not self._is_healthy():
            assert time.monotonic() < deadline_s
            time.sleep(0.05)

    def __enter__(self) -> EtcdServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def url(self, prefix: str = "jobs/a") -> str:
        """For --state."""
        return f"etcd://127.0.0.1:{self.port}/{prefix}"

    def ask(self, path: str, **body: Any) -> Any:
        """The answer to a request, past the client of Farandole."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v3/{path}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=_DEADLINE_S) as response:
            return json.loads(response.read())

    def suspend(self) -> None:
        """It answers nobody until `resume()`."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """It goes on."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """Start it again, with its data."""
        self._start()

    def keys(self) -> int:
        """How many there are."""
        return int(self.ask("kv/range", key="AA==", range_end="AA==", count_only=True).get("count", 0))

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1) as response:
                return bool(json.loads(response.read())["health"] == "true")
        except (urllib.error.URLError, OSError):
            return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
