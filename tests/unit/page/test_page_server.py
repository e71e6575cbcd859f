"""The server of the page, without a job: files, feed, metrics, tokens, and requests that nobody sends on purpose."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="it needs aiohttp: pip install 'farandole[page]'")
pytest.importorskip("prometheus_client", reason="it needs prometheus_client: pip install 'farandole[page]'")

import aiohttp

import farandole.integrations.page
from farandole.base.wire.control import Accepted, AskDrain, AskScale, AskUndrain, Declined
from farandole.integrations.page import page_server
from farandole.integrations.page.page_connections import most_connections
from farandole.integrations.page.page_server import (
    MESSAGES_KEPT,
    PAGES_AT_ONCE,
    PageServer,
    Request,
    is_local_name,
    page_token,
)
from farandole.job.launch.job_history import JobHistory
from tests.support.waiting import run
from tests.unit.page.test_job_history import status

TOKEN = page_token(b"the job's token")
WITH_TOKEN = {"Authorization": f"Bearer {TOKEN}"}


class Served:
    """A server on a port of its own, the requests that reached the job, and a client."""

    def __init__(self, is_open: bool) -> None:
        self.asked: list[Request] = []
        self.answer: Accepted | Declined | Exception = Accepted("the job will have 3 workers")
        self.history = JobHistory("job")
        self.server = PageServer(self.history, TOKEN, self._request, is_open)
        self.port = 0

    async def _request(self, asked: Request) -> Accepted | Declined:
        self.asked.append(asked)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def get(self, path: str, **headers: str) -> Any:
        return self.client.get(self.url(path), headers=headers)

    def post(self, path: str, body: object, headers: dict[str, str] | None = None) -> Any:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.client.post(self.url(path), data=data, headers=headers or {})

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"


@contextlib.asynccontextmanager
async def serving(is_open: bool = True) -> AsyncIterator[Served]:
    served = Served(is_open)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        served.port = sock.getsockname()[1]
        await served.server.start([sock])
        async with aiohttp.ClientSession() as served.client:
            yield served
        await served.server.stop()


async def message(stream: aiohttp.StreamReader) -> tuple[str, str, Any]:
    """The next message of a feed: its kind, id and data."""
    text = (await stream.readuntil(b"\n\n")).decode()
    fields = dict(line.split(": ", 1) for line in text.strip().split("\n"))
    return fields["event"], fields["id"], json.loads(fields["data"])


def test_the_page_is_small_and_complete() -> None:
    folder = Path(farandole.integrations.page.__path__[0]) / "static"
    files = {each.name: each.read_text() for each in folder.iterdir()}
    assert sum(len(text.encode()) for text in files.values()) <= 150_000
    for name, text in files.items():
        for mentioned in [word.split('"')[0] for word in text.split('from "./')[1:]]:
            assert mentioned in files, f"{name} imports {mentioned}"
        assert "http://" not in text.replace("http://www.w3.org/", ""), name
    for mentioned in [word.split('"')[0] for word in files["index.html"].split('"/static/')[1:]]:
        assert mentioned in files


def test_the_first_paint_needs_one_request_and_nothing_else_may_be_in_the_page() -> None:
    async def body() -> None:
        async with serving() as served:
            response = await served.get("/")
            text, policy = await response.text(), response.headers["Content-Security-Policy"]
            assert 'rel="stylesheet"' not in text
            for kind, pattern in (("style", "<style>(.*?)</style>"), ("script", "<script>(.*?)</script>")):
                (inside,) = re.findall(pattern, text, re.DOTALL)
                digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
                assert f"{kind}-src 'self' 'sha256-{digest}'" in policy
            assert "unsafe" not in policy
            assert policy.startswith("default-src 'none'")

    run(body())


def test_files_are_served_and_others_are_not() -> None:
    async def body() -> None:
        async with serving() as served:
            async with served.get("/") as page:
                text = await page.text()
                assert page.status == 200
                assert "default-src 'none'" in page.headers["Content-Security-Policy"]
            assert "<main" in text
            async with served.get("/static/page.js") as script:
                assert (script.status, script.content_type) == (200, "text/javascript")
            async with served.get("/static/page.js", **{"If-None-Match": script.headers["ETag"]}) as again:
                assert again.status == 304
            for path in ("/static/../page_server.py", "/static/%2e%2e%2fpage_server.py", "/static/none", "/none"):
                async with served.get(path) as missing:
                    assert missing.status == 404, path
            async with served.client.delete(served.url("/")) as refused:
                assert refused.status == 405

    run(body())


def test_the_feed_begins_with_the_picture_and_goes_on_with_what_happens() -> None:
    async def body() -> None:
        async with serving() as served:
            served.history.on_status(status(), 1.0)
            async with served.get("/feed") as feed:
                kind, _, picture = await message(feed.content)
                assert (kind, picture["job"], picture["status"]["step"]) == ("picture", "job", 7)
                served.server.feed.publish("contact", {"contact": "lost"})
                assert (await message(feed.content))[::2] == ("contact", {"contact": "lost"})
                assert served.server.feed.pages == 1

    run(body())


def test_a_page_that_comes_back_gets_what_it_has_missed_and_nothing_twice() -> None:
    async def body() -> None:
        async with serving() as served:
            publish = served.server.feed.publish
            async with served.get("/feed") as feed:
                await message(feed.content)
                publish("event", {"number": 1})
                _, last_id, _ = await message(feed.content)
            publish("event", {"number": 2})
            publish("event", {"number": 3})
            async with served.get("/feed", **{"Last-Event-ID": last_id}) as feed:
                assert [(await message(feed.content))[2]["number"] for _ in range(2)] == [2, 3]
                publish("event", {"number": 4})
                assert (await message(feed.content))[2]["number"] == 4
            for number in range(MESSAGES_KEPT + 10):
                publish("event", {"number": number})
            for unknown in (last_id, "0.1", "nonsense", "a.b.c", ".", f"{last_id}9999", "1" * 4000):
                async with served.get("/feed", **{"Last-Event-ID": unknown}) as feed:
                    assert (await message(feed.content))[0] == "picture", unknown

    run(body())


def test_a_page_that_does_not_read_is_hung_up_on_and_the_others_are_not() -> None:
    async def body() -> None:
        async with serving() as served:
            feed = served.server.feed
            slow, quick = feed.open("", dict), feed.open("", dict)
            for number in range(page_server._QUEUED_MESSAGES + 1):
                feed.publish("event", {"number": number})
                quick.get_nowait()
            assert slow.get_nowait() is None
            assert feed.pages == 1

    run(body())


def test_there_is_a_limit_for_pages() -> None:
    async def body() -> None:
        async with serving() as served:
            for _ in range(PAGES_AT_ONCE):
                served.server.feed.open("", dict)
            async with served.get("/feed") as refused:
                assert refused.status == 503

    run(body())


@pytest.mark.parametrize(
    ("path", "body", "asked"),
    [
        ("/scale", {"size": 3}, AskScale(3)),
        ("/drain", {"host": "there"}, AskDrain("there")),
        ("/undrain", {"host": "there"}, AskUndrain("there")),
    ],
)
def test_a_request_with_the_token_reaches_the_job(path: str, body: object, asked: Request) -> None:
    async def ask() -> None:
        async with serving() as served:
            async with served.post(path, body, WITH_TOKEN) as done:
                assert await done.json() == {"accepted": "the job will have 3 workers"}
            served.answer = Declined("the job is ending")
            async with served.post(path, body, WITH_TOKEN) as declined:
                assert (declined.status, await declined.json()) == (409, {"error": "the job is ending"})
            served.answer = ConnectionError("it has ended")
            async with served.post(path, body, WITH_TOKEN) as lost:
                assert lost.status == 503
            assert served.asked == [asked] * 3

    run(ask())


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize(
    "authorization", ["", "Bearer", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}0", "Bearer \u00fc\u00fc", "Basic YTpi"]
)
def test_a_request_without_the_token_changes_nothing(is_open: bool, authorization: str) -> None:
    async def body() -> None:
        async with serving(is_open) as served:
            headers = {"Authorization": authorization} if authorization else {}
            for path in ("/scale", "/drain", "/undrain"):
                async with served.post(path, {"size": 3}, headers) as refused:
                    assert refused.status == 401
            assert served.asked == []

    run(body())


def test_at_an_address_of_others_nothing_of_the_job_is_told_without_the_token() -> None:
    async def body() -> None:
        async with serving(is_open=False) as served:
            async with served.get("/") as page:  # it has the form for the token
                assert page.status == 200
            for path in ("/feed", "/metrics"):
                async with served.get(path) as refused:
                    assert (refused.status, "token" in (await refused.json())["error"]) == (401, True)
                async with served.get(path, **WITH_TOKEN) as given:
                    assert given.status == 200

    run(body())


def test_another_site_whose_name_leads_here_learns_nothing() -> None:
    async def body() -> None:
        async with serving() as served:
            for host in ("evil.example", "evil.example:80", "localhost.evil.example"):
                for path in ("/feed", "/metrics", "/"):
                    async with served.get(path, Host=host) as refused:
                        assert refused.status == 403
            for host in ("localhost:1234", "127.0.0.1", "[::1]:80"):
                async with served.get("/metrics", Host=host) as given:
                    assert given.status == 200

    run(body())


@pytest.mark.parametrize(("host", "is_local"), [("localhost", True), ("[::1]", True), ("a", False), ("", False)])
def test_names_of_this_machine(host: str, is_local: bool) -> None:
    assert is_local_name(host) == is_local


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'{"size": "3"}', b'{"size": 3, "host": "a"}', b'{"host": 3}', b"\xff\xfe", b"[" * 4000,
     b'{"size": 1e400}', b'{"type": "AskDrain", "host": "a"}'],
    ids=str,
)  # fmt: skip
def test_nonsense_is_refused_with_a_reason(body: bytes) -> None:
    async def ask() -> None:
        async with serving() as served:
            for path in ("/scale", "/drain"):
                async with served.post(path, body, WITH_TOKEN) as refused:
                    assert refused.status == 400, await refused.text()
            async with served.post("/scale", b"x" * 10_000, WITH_TOKEN) as too_long:
                assert too_long.status in (400, 413)
            assert served.asked == []

    run(ask())


def test_garbage_on_the_port_harms_nobody() -> None:
    async def body() -> None:
        async with serving() as served:
            for garbage in (
                b"\0" * 1000,
                b"GET",
                b"GET /feed HTTP/1.1\r\n\r\n",
                b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
            ):
                reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
                writer.write(garbage)
                with contextlib.suppress(ConnectionError):
                    await asyncio.wait_for(reader.read(100), 1) if garbage != b"GET" else None
                writer.close()
            async with served.get("/metrics") as given:
                assert given.status == 200

    run(body())


def test_the_end_of_the_server_ends_the_feeds_after_the_last_message() -> None:
    async def body() -> None:
        async with serving() as served, served.get("/feed") as feed:
            await message(feed.content)
            served.server.feed.publish("contact", {"contact": "ended"})
            await served.server.stop()
            assert (await message(feed.content))[2] == {"contact": "ended"}
            assert await feed.content.read() == b""

    run(body())


def test_the_token_of_the_page_does_not_disclose_that_of_the_job() -> None:
    assert page_token(b"a") != page_token(b"b")
    assert len(page_token(b"a")) == 32


def test_connections_without_a_complete_request_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "open_files_limit", lambda: 0)  # as few as possible: 8

    async def body() -> None:
        async with serving() as served, served.get("/feed") as feed:
            await message(feed.content)
            with contextlib.ExitStack() as held:
                half_open = []
                for _ in range(40):
                    half_open.append(held.enter_context(socket.create_connection(("127.0.0.1", served.port))))
                    half_open[-1].sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
                    await asyncio.sleep(0)
                async with served.get("/") as page:
                    assert page.status == 200
                for each in half_open[:16]:
                    each.settimeout(10.0)
                    assert await asyncio.to_thread(ended, each)
            served.server.feed.publish("contact", {"contact": "lost"})
            assert (await message(feed.content))[0] == "contact"

    run(body())


def ended(connected: socket.socket) -> bool:
    """Whether the other end hung up."""
    try:
        return connected.recv(1) == b""
    except ConnectionResetError:
        return True


def test_connections_that_have_been_served_make_room_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "open_files_limit", lambda: 0)

    async def body() -> None:
        async with serving() as served:
            with contextlib.ExitStack() as held:
                for _ in range(40):
                    each = held.enter_context(socket.create_connection(("127.0.0.1", served.port), 10.0))
                    each.sendall(b"GET /static/page.css HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    assert (await asyncio.to_thread(each.recv, 12)) == b"HTTP/1.1 200"
                async with served.get("/") as page:
                    assert page.status == 200

    run(body())


def test_bytes_that_are_no_request_leave_nothing_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with serving() as served:
            for garbage in (b"x\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\na b: c\r\n\r\n", bytes(100)):
                with socket.create_connection(("127.0.0.1", served.port), 10.0) as each:
                    each.sendall(garbage)
                    each.shutdown(socket.SHUT_WR)
                    await asyncio.to_thread(ended, each)

    run(body())
    assert [each for each in caplog.records if each.levelname in ("WARNING", "ERROR")] == []


@pytest.mark.parametrize(("limit", "most"), [(0, 8), (256, 96), (1024, 480), (1 << 20, 512)])
def test_the_number_of_connections_follows_from_the_limit_of_open_files(limit: int, most: int) -> None:
    assert most_connections(limit) == most
