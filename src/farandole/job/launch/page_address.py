"""The address of a page, and its process under `farandole run --page`. It loads neither asyncio nor the server."""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from farandole.errors import ConfigError

if TYPE_CHECKING:
    from farandole.job.launch.job_files import JobFile

DEFAULT_PORT = 8470
_PORTS_TRIED = 30
_BACKLOG = 128
_END_S = 3.0

FROM_LAUNCHER = "--from-launcher"
"""The option, which help does not show, by which a launcher starts `farandole page`: the descriptor of the socket."""


class PageAddress(NamedTuple):
    """The address on which a page is to be served. `port` None: the default one, or the next that is free."""

    host: str = "127.0.0.1"
    port: int | None = None


class PageOptions(NamedTuple):
    """The page of a job that is about to begin. `traces`: the address of the collector to which its process exports
    spans; empty: as the environment says; None: to none."""

    address: PageAddress
    traces: str | None = None


def parse_page_address(text: str | None) -> PageAddress:
    """Return the address in HOST:PORT, HOST or :PORT; None: the default. Raises ConfigError for another text, and where
    the packages of the page are missing."""
    missing = [name for name in ("aiohttp", "prometheus_client") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"the page needs the package {' and '.join(missing)}: pip install 'farandole[page]'")
    if not text:
        return PageAddress()
    host, port = _divided(text)
    host = host or "127.0.0.1"
    with contextlib.suppress(ValueError):
        if host != "localhost":
            ipaddress.ip_address(host)
        if port is None or (port.isascii() and port.isdigit() and int(port) < 65536):
            return PageAddress(host, None if port is None else int(port))
    raise ConfigError(
        f"the address of the page must be HOST:PORT with a numeric address of this machine, for example "
        f"127.0.0.1:{DEFAULT_PORT} or 0.0.0.0:{DEFAULT_PORT}, got {text!r}"
    )


def page_options(page: str | None, traces: str | None) -> PageOptions | None:
    """Return what --page and --traces ask for; None: neither was given. Raises ConfigError for values that cannot be
    used, and where packages are missing."""
    if traces is not None:
        check_traces(traces)
    elif page is None:
        return None
    return PageOptions(parse_page_address(page), traces)


def check_traces(url: str) -> None:
    """Raise ConfigError for the address of a collector that cannot be used, and where the packages are missing."""
    try:
        is_there = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:  # one of its parents
        is_there = False
    if not is_there:
        raise ConfigError("--traces needs OpenTelemetry: pip install 'farandole[page,traces]'")
    if url and not url.startswith(("http://", "https://")):
        raise ConfigError(f"--traces must be an address of HTTP, such as http://localhost:4318/v1/traces, got {url!r}")


def _divided(text: str) -> tuple[str, str | None]:
    if text.startswith("[") and "]" in text:
        host, _, rest = text[1:].partition("]")
        return host, rest.removeprefix(":") if rest else None
    if text.count(":") > 1:
        return text, None  # an address of IPv6 without a port
    host, colon, port = text.partition(":")
    return host, port if colon else None


def listening(address: PageAddress) -> socket.socket:
    """Return a socket that listens there. Raises ConfigError when that is not possible."""
    last = DEFAULT_PORT + _PORTS_TRIED - 1
    ports: Sequence[int] = range(DEFAULT_PORT, last + 1) if address.port is None else (address.port,)
    for port in ports:
        try:
            family, _, _, _, where = socket.getaddrinfo(address.host, port, type=socket.SOCK_STREAM)[0]
            return socket.create_server((where[0], where[1]), family=family, backlog=_BACKLOG)
        except OSError as error:
            problem = os.strerror(error.errno) if error.errno else str(error)
    where_ = f"{address.host} port {ports[0]}" if len(ports) == 1 else f"{address.host} ports {ports[0]} to {last}"
    raise ConfigError(f"the page cannot be served on {where_}: {problem}; choose another HOST:PORT")


def is_loopback(sock: socket.socket) -> bool:
    """Return whether only this machine can reach a socket."""
    return ipaddress.ip_address(sock.getsockname()[0]).is_loopback


def url_of(sock: socket.socket) -> str:
    """Return the address of the page for a browser on this machine, or on others."""
    host, port = sock.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = socket.gethostname()
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


class PageProcess:
    """The page of `farandole run --page`: a process of its own, which costs the launcher nothing. Raises ConfigError
    when nothing can listen at the address."""

    def __init__(self, options: PageOptions) -> None:
        self._socket, self._traces = listening(options.address), options.traces

    @property
    def notice(self) -> str:
        """The line that tells the user where the page is."""
        token = "drain and scale need its token" if is_loopback(self._socket) else "it needs its token"
        return f"page: {url_of(self._socket)} ({token}: farandole page --print-token)"

    def close(self) -> None:
        """Do not listen any more, where the job has not begun. Idempotent."""
        self._socket.close()

    @contextlib.contextmanager
    def serve(self, job: JobFile) -> Iterator[None]:
        """Serve the page of the job inside the block. A page that ends early is not started again, and harms
        nothing."""
        number = self._socket.fileno()
        command = [sys.executable, "-m", "farandole", "page", FROM_LAUNCHER, str(number)]
        command += [] if self._traces is None else [f"--traces={self._traces}"]
        with self._socket:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(number,))
        assert process.stdin is not None
        try:
            with contextlib.suppress(OSError):
                process.stdin.write(msgspec.json.encode(job) + b"\n")
                process.stdin.flush()
            yield
        finally:
            with contextlib.suppress(OSError):
                process.stdin.close()  # its end, also if this process is killed
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
