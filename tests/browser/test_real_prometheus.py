"""The metrics and the dashboard's queries in a real Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="it needs aiohttp: pip install 'farandole[page]'")
pytest.importorskip("prometheus_client", reason="it needs prometheus_client: pip install 'farandole[page]'")

from farandole.base.wire.control import Accepted
from farandole.integrations.page.page_server import PageServer, page_token
from farandole.integrations.page.prometheus_metrics import JobMetrics
from tests.unit.page.test_prometheus_metrics import DASHBOARD, expressions, telling

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="it needs Prometheus: make test-page, or apt-get install prometheus",
)

DEADLINE_S = 60.0

FROM_THE_SECOND_SAMPLE = ("increase(", "deriv(", "rate(")
"""Functions of time, which have no result before."""


def test_promtool_has_nothing_to_complain_of() -> None:
    text, _ = JobMetrics(telling().history).render("")
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stderr.decode()) == (0, ""), done.stdout.decode()


def test_every_query_of_the_dashboard_has_a_result(tmp_path: Path) -> None:
    async def body() -> None:
        async def refuse(_: object) -> Accepted:
            raise ConnectionError

        server = PageServer(telling().history, page_token(b"token"), refuse, is_open=True)
        with socket.create_server(("127.0.0.1", 0)) as sock:
            await server.start([sock])
            await asyncio.to_thread(check, tmp_path, sock.getsockname()[1])
            await server.stop()

    asyncio.run(body())


def check(folder: Path, port: int) -> None:
    job = {"job_name": "farandole", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
    (folder / "config.yml").write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    words = [f"--config.file={folder / 'config.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    command = ["prometheus", *words, f"--web.listen-address={address}", "--log.level=error"]
    with subprocess.Popen(command) as prometheus:
        try:
            ask_until(address, "farandole_up", lambda result: bool(result))
            for query in expressions(json.loads(DASHBOARD.read_text())):
                if found := re.fullmatch(r"label_values\((\w+), (\w+)\)", query):
                    assert [each["metric"][found[2]] for each in ask(address, found[1])] == [f"127.0.0.1:{port}"]
                elif query.startswith("changes("):  # nothing has changed
                    assert ask(address, query.replace("$instance", ".*")) == []
                elif any(function in query for function in FROM_THE_SECOND_SAMPLE):
                    ask_until(address, query.replace("$instance", ".*"), lambda result: bool(result))
                else:
                    assert ask(address, query.replace("$instance", ".*")), query
        finally:
            prometheus.terminate()


def ask(address: str, query: str) -> list[Any]:
    """The result of a query. Raises HTTPError for one that is not valid."""
    words = urllib.parse.urlencode({"query": query})
    try:
        answer = json.load(urllib.request.urlopen(f"http://{address}/api/v1/query?{words}", timeout=DEADLINE_S))
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{query}: {error.read().decode()}") from None
    assert answer["status"] == "success", (query, answer)
    result: list[Any] = answer["data"]["result"]
    return result


def ask_until(address: str, query: str, is_enough: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError):
            if is_enough(ask(address, query)):
                return
        time.sleep(0.2)
    raise TimeoutError(query)
