"""The server of the page: static files, the feed of server-sent events, metrics, and requests to the job.

    GET  /                      the page; its files are below /static/
    GET  /feed                  server-sent events: first the whole picture, then what changes. With Last-Event-ID only
                                what has changed since then, if that is still known
    GET  /metrics               for Prometheus
    GET  /trace.json            the generations so far, for Perfetto and chrome://tracing
    POST /scale /drain /undrain {"size": 3} or {"host": "name"}: always with the token

Data is for everybody who reaches a loopback address, and elsewhere for those with the token, as
`Authorization: Bearer TOKEN`. It is derived from the job's token, and does not disclose it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import secrets
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import resources
from typing import Any

import msgspec
from aiohttp import hdrs, web

from farandole.base.machine import wall_time_s
from farandole.base.wire.authentication import derive_key
from farandole.base.wire.control import Accepted, AskDrain, AskScale, AskUndrain, Declined
from farandole.integrations.page.page_connections import (
    PageConnections,
    most_connections,
    open_files_limit,
    quiet_logger,
)
from farandole.integrations.page.prometheus_metrics import JobMetrics
from farandole.job.launch.job_history import JobHistory
from farandole.job.launch.job_trace import trace_of

Request = AskScale | AskDrain | AskUndrain
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MESSAGES_KEPT = 256
"""The number of messages that a page which connects again can catch up with; after more it gets the whole picture."""

PAGES_AT_ONCE = 200
"""The number of pages that may follow the job at the same time."""

_QUEUED_MESSAGES = 128  # for a page that does not read; then it is hung up on, and connects again
_REQUEST_BYTES = 4096
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def page_token(job_token: bytes) -> str:
    """Return the token of a job's page, which its user derives from that of the job."""
    return derive_key(job_token, b"page").hex()[:32]


class Feed:
    """The messages to the pages, encoded once for all of them. Each has an id: of this server, and a number."""

    def __init__(self) -> None:
        self._run, self._count = secrets.token_hex(4), 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=MESSAGES_KEPT)
        self._pages: set[asyncio.Queue[bytes | None]] = set()

    def publish(self, kind: str, data: dict[str, Any]) -> None:
        """Send a message to all pages."""
        self._count += 1
        message = _encoded(kind, data, f"{self._run}.{self._count}")
        self._kept.append((self._count, message))
        for page in list(self._pages):
            try:
                page.put_nowait(message)
            except asyncio.QueueFull:
                self._pages.discard(page)
                while not page.empty():
                    page.get_nowait()
                page.put_nowait(None)

    def open(self, last_id: str, picture: Callable[[], dict[str, Any]]) -> asyncio.Queue[bytes | None]:
        """Return the queue of a new page, with the messages that it needs first; None in it is the end."""
        page: asyncio.Queue[bytes | None] = asyncio.Queue(_QUEUED_MESSAGES)
        missed = self._after(last_id)
        if missed is None:
            missed = [_encoded("picture", picture(), f"{self._run}.{self._count}")]
        page.put_nowait(b"".join(missed) or b": nothing was missed\n\n")
        self._pages.add(page)
        return page

    def close(self, page: asyncio.Queue[bytes | None]) -> None:
        """Forget a page that has gone."""
        self._pages.discard(page)

    @property
    def pages(self) -> int:
        """The number of pages that follow the job."""
        return len(self._pages)

    def end(self) -> None:
        """End the streams of all pages."""
        for page in list(self._pages):
            self._pages.discard(page)
            if page.full():
                page.get_nowait()
            page.put_nowait(None)

    def _after(self, last_id: str) -> list[bytes] | None:
        """Return the messages after that with the id; None where it is not known, or too old."""
        run, _, text = last_id.partition(".")
        if run != self._run or not text.isascii() or not text.isdigit() or len(text) > 15:
            return None
        number = int(text)
        oldest = self._kept[0][0] if self._kept else self._count + 1
        if not oldest - 1 <= number <= self._count:
            return None
        return [message for count, message in self._kept if count > number]


class PageServer:
    """Serves one job: `async with`, on sockets that listen already.

    Args:
        history: The job.
        token: That of page_token().
        request: Sends a request to the coordinator. It may raise OSError, or a FarandoleError.
        is_open: Data is for everybody who reaches the address: it is a loopback address.
    """

    def __init__(
        self,
        history: JobHistory,
        token: str,
        request: Callable[[Request], Awaitable[Accepted | Declined]],
        is_open: bool,
    ) -> None:
        self._history, self._token, self._request, self._is_open = history, token, request, is_open
        self.feed = Feed()
        self._metrics = JobMetrics(history)
        self._files = {
            each.name: each.read_bytes() for each in resources.files(__package__).joinpath("static").iterdir()
        }
        self._files["index.html"], self._policy = _in_one_file(self._files)
        self._tag = f'"{secrets.token_hex(8)}"'
        application = web.Application(middlewares=[self._bound, self._guard], client_max_size=_REQUEST_BYTES)
        application.add_routes(
            [
                web.get("/", self._index),
                web.get("/static/{name}", self._static),
                web.get("/feed", self._serve_feed),
                web.get("/metrics", self._serve_metrics),
                web.get("/trace.json", self._serve_trace),
                web.post("/{action:scale|drain|undrain}", self._act),
            ]
        )
        self._runner = web.AppRunner(
            application, access_log=None, handle_signals=False, shutdown_timeout=1.0, logger=quiet_logger()
        )
        self._most = most_connections(open_files_limit())
        self._connections: PageConnections | None = None

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        """Serve on sockets that listen."""
        await self._runner.setup()
        assert self._runner.server is not None
        self._connections = PageConnections(self._runner.server, self._most)
        self._connections.open([each.dup() for each in sockets])

    async def stop(self) -> None:
        """Tell the pages that nothing more will come, and close all connections."""
        self.feed.end()
        if self._connections is not None:
            self._connections.close()
        await self._runner.cleanup()

    # Who may do what ----------------------------------------------------------------------------------------

    @web.middleware
    async def _bound(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Count the connection as one without a request, but while its request is handled."""
        transport, connections = request.transport, self._connections
        if transport is None or connections is None:
            return await handler(request)
        connections.busy(transport)
        try:
            return await handler(request)
        finally:
            if not transport.is_closing():
                connections.idle(transport)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        is_file = request.path == "/" or request.path.startswith("/static/")
        if not self._has_token(request):
            if request.method == hdrs.METH_POST or not (is_file or self._is_open):
                return _refusal(401, "the token of the page is missing, or wrong: farandole page --print-token")
            if self._is_open and not is_local_name(request.host):
                # A page of another site, whose name leads to this machine, must not read the job (DNS rebinding).
                return _refusal(403, f"this page is served at addresses of this machine, not as {request.host!r}")
        try:
            response = await handler(request)
        except web.HTTPException as refused:
            return _refusal(refused.status, refused.reason)
        if not response.prepared:
            response.headers.update({**_HEADERS, **response.headers})
        return response

    def _has_token(self, request: web.Request) -> bool:
        given = request.headers.get(hdrs.AUTHORIZATION, "").removeprefix("Bearer ").strip()
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._token.encode())

    # What it serves -----------------------------------------------------------------------------------------

    async def _index(self, request: web.Request) -> web.StreamResponse:
        response = self._file(request, "index.html")
        response.headers["Content-Security-Policy"] = self._policy
        return response

    async def _static(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in self._files:
            raise web.HTTPNotFound
        return self._file(request, name)

    def _file(self, request: web.Request, name: str) -> web.Response:
        headers = {hdrs.ETAG: self._tag, hdrs.CACHE_CONTROL: "no-cache"}
        if request.headers.get(hdrs.IF_NONE_MATCH) == self._tag:
            return web.Response(status=304, headers=headers)
        kind = _TYPES[name.rpartition(".")[2]]
        return web.Response(body=self._files[name], content_type=kind, charset="utf-8", headers=headers)

    async def _serve_feed(self, request: web.Request) -> web.StreamResponse:
        if self.feed.pages >= min(PAGES_AT_ONCE, self._most):
            return _refusal(503, f"{self.feed.pages} pages follow this job already")
        response = web.StreamResponse(headers={**_HEADERS, hdrs.CACHE_CONTROL: "no-store"})
        response.content_type = "text/event-stream"
        page = self.feed.open(request.headers.get("Last-Event-ID", ""), lambda: self._history.as_dict(wall_time_s()))
        try:
            await response.prepare(request)
            while (message := await page.get()) is not None:
                await response.write(message)
        except ConnectionError:
            pass  # the page was closed
        finally:
            self.feed.close(page)
        return response

    async def _serve_metrics(self, request: web.Request) -> web.StreamResponse:
        body, content_type = self._metrics.render(request.headers.get(hdrs.ACCEPT, ""))
        return web.Response(body=body, headers={hdrs.CONTENT_TYPE: content_type})

    async def _serve_trace(self, request: web.Request) -> web.StreamResponse:
        history, now = self._history, wall_time_s()
        began = history.generations[0].at if history.generations else now
        events = trace_of(history, int(began * 1e6), now)
        headers = {hdrs.CACHE_CONTROL: "no-store"}
        return web.Response(body=msgspec.json.encode(events), content_type="application/json", headers=headers)

    async def _act(self, request: web.Request) -> web.StreamResponse:
        kinds: dict[str, type[Request]] = {"scale": AskScale, "drain": AskDrain, "undrain": AskUndrain}
        kind = kinds[request.match_info["action"]]
        try:
            asked: Request = _decoded(kind, await request.read())
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return _refusal(400, f"the request is not valid: {error}")
        try:
            async with asyncio.timeout(_ANSWER_S):
                answer = await self._request(asked)
        except Exception as error:  # noqa: BLE001 - whatever it is, the page shows it, and goes on
            return _refusal(503, f"the job does not answer: {error}")
        if isinstance(answer, Accepted):
            return web.json_response({"accepted": answer.what})
        return _refusal(409, answer.reason)


_ANSWER_S = 15.0


def is_local_name(host: str) -> bool:
    """Return whether a Host header names an address, or localhost: a browser that was led here by the name of another
    site sends that name."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and not host.endswith("]") else host
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _in_one_file(files: Mapping[str, bytes]) -> tuple[bytes, str]:
    """Return the page with all in it that its first paint needs, so that this needs one request, and its policy: what
    else the page may load, and the hashes of what is in it (https://www.w3.org/TR/CSP3/, 6.7.3)."""
    page, sources = files["index.html"], {"script": "'self'", "style": "'self'"}
    for link, element, name in (
        (b'<link rel="stylesheet" href="/static/page.css">', "style", "page.css"),
        (b'<script src="/static/boot.js"></script>', "script", "boot.js"),
    ):
        assert link in page, link
        page = page.replace(link, b"<%s>%s</%s>" % (element.encode(), files[name], element.encode()))
        sources[element] += f" 'sha256-{base64.b64encode(hashlib.sha256(files[name]).digest()).decode()}'"
    allowed = "".join(f"; {kind}-src {source}" for kind, source in sources.items())
    return page, f"{_HEADERS['Content-Security-Policy']}{allowed}; img-src 'self'; connect-src 'self'"


def _decoded(kind: type[Request], body: bytes) -> Request:
    values = msgspec.json.decode(body, type=dict[str, int | str])
    if "type" in values:
        raise ValueError("the path says what is asked for")
    return msgspec.convert({**values, "type": kind.__name__}, kind)


def _encoded(kind: str, data: dict[str, Any], number: str) -> bytes:
    return b"event: %s\nid: %s\ndata: %s\n\n" % (kind.encode(), number.encode(), msgspec.json.encode(data))


def _refusal(status: int, reason: str) -> web.Response:
    headers = {**_HEADERS, hdrs.WWW_AUTHENTICATE: "Bearer"} if status == 401 else _HEADERS
    return web.json_response({"error": reason}, status=status, headers=headers)
