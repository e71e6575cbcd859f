"""How soon Chromium paints the page of a job of 64 workers, first without other load, then while two workers train
beside it: the head of the page, and all of it with the job's data.

PYTHONPATH=src .venv-browser/bin/python -m tests.browser.first_paint --loads 30     # after make test-page has made it

Each load has a context and a process of its own, so nothing of it is in a cache. The page is served by a process of its
own, as by `farandole run --page`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)

WORKERS = 64

_LOOK_S = 0.05
_DEADLINE_S = 60.0

_WATCH = """
new MutationObserver((_, observer) => {
  if (document.querySelectorAll("#workers tr").length < WORKERS) return;
  observer.disconnect();
  requestAnimationFrame(() => setTimeout(() => { window.allShownMs = performance.now(); }));
}).observe(document, { childList: true, subtree: true });
""".replace("WORKERS", str(WORKERS))


class Load(NamedTuple):
    """Milliseconds from the navigation until the first paint, and until the frame with all workers."""

    paint_ms: float
    shown_ms: float


def load(browser: Any, url: str) -> Load:
    """Load the page in a context of its own."""
    context = browser.new_context()
    try:
        page = context.new_page()
        page.add_init_script(_WATCH)
        page.goto(url)
        deadline_s = time.monotonic() + _DEADLINE_S
        while not page.evaluate("window.allShownMs > 0"):
            assert time.monotonic() < deadline_s, page.inner_text("body")
            page.wait_for_timeout(1000 * _LOOK_S)  # rarely: this costs the time that is measured
        paint_ms = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        return Load(paint_ms, page.evaluate("window.allShownMs"))
    finally:
        context.close()


@contextlib.contextmanager
def served_page() -> Iterator[str]:
    """Serve the page of a job that trains, and return its address."""
    command = [sys.executable, "-m", "tests.browser.first_paint", "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()  # leaving the block closes its stdin, which ends it


async def _serve() -> None:
    import os
    import socket

    from farandole.base.membership import WorkerTelemetry
    from farandole.base.wire.control import Accepted
    from farandole.integrations.page.page_command import NICENESS
    from farandole.integrations.page.page_server import PageServer, page_token
    from farandole.job.launch.job_history import JobHistory
    from tests.unit.page.test_job_history import status

    async def refuse(_: object) -> Accepted:
        raise ConnectionError

    os.nice(NICENESS)
    history = JobHistory()
    history.on_status(status(telemetry=WorkerTelemetry(0.02, 0.005, 1, 120, 600), workers=WORKERS), time.time())
    server = PageServer(history, page_token(b"token"), refuse, is_open=True)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        await server.start([sock])
        print(f"http://127.0.0.1:{sock.getsockname()[1]}/", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await server.stop()


@contextlib.contextmanager
def _job_beside() -> Iterator[None]:
    """Train with two workers."""
    with tempfile.TemporaryDirectory() as folder:
        steps = Path(folder) / "steps"
        train = [sys.executable, "-m", "benchmarks.strangers", "--train", str(steps), "--model", "mlp"]
        with subprocess.Popen([sys.executable, "-m", "farandole", "run", "-np", "2", "-q", *train]) as job:
            try:
                while not steps.exists() or steps.stat().st_size < 1000:
                    assert job.poll() is None
                    time.sleep(0.1)
                yield
            finally:
                job.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, default=30)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(_serve())
        return
    from playwright import sync_api as playwright

    with served_page() as url, playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for what, beside in (("alone", contextlib.nullcontext()), ("beside a job", _job_beside())):
            with beside:
                load(browser, url)
                loads = [load(browser, url) for _ in range(options.loads)]
            for name, values in (
                ("first paint", [each.paint_ms for each in loads]),
                ("all shown", [each.shown_ms for each in loads]),
            ):
                low, middle, high = min(values), statistics.median(values), max(values)
                print(f"{what}: {name} median {middle:.0f} ms, {low:.0f} to {high:.0f} ms of {len(values)}", flush=True)
        browser.close()


if __name__ == "__main__":
    main()
