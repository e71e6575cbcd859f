"""The page of a job in a real browser: it shows what the job's events say, and everybody can read it.

`make test-page` installs what this needs. PAGE_PICTURES=docs stores the pictures of the documentation there.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from farandole.base.events.kinds import KINDS
from farandole.testing.running_job import all_training
from tests.browser.first_paint import CHROMIUM, load, served_page
from tests.support.jobs import ELASTIC_JOB, RunningJob, farandole
from tests.unit.page.test_job_trace import check, lanes_of

playwright = pytest.importorskip("playwright.sync_api", reason="it needs playwright: make test-page")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="it needs axe-core: make test-page")
pytest.importorskip("aiohttp", reason="it needs aiohttp: pip install 'farandole[page]'")
pytest.importorskip("prometheus_client", reason="it needs prometheus_client: pip install 'farandole[page]'")

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="it needs Chromium: make test-page, or apt-get install chromium"),
    pytest.mark.alone,
    pytest.mark.timeout(300),
]

DEADLINE_MS = 60_000

WATCH_EVENTS = """
window.latenciesMs = [];
document.addEventListener("DOMContentLoaded", () => {
  new MutationObserver((changes) => {
    for (const change of changes) for (const item of change.addedNodes) {
      window.latenciesMs.push(Date.now() - Date.parse(item.querySelector("time").dateTime));
    }
  }).observe(document.getElementById("events"), { childList: true });
});
"""


@dataclass
class Seen:
    """The page at the end of a job in which a worker was killed and another one was asked for."""

    browser: Any
    page: Any
    url: str
    told: list[dict[str, Any]]
    status: dict[str, Any]
    latencies_ms: list[float]
    errors: list[str]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """Three workers train; rank 1 is killed and replaced; then the page's form asks for a fourth worker."""
    folder = tmp_path_factory.mktemp("job")
    runtime = folder / "runtime"
    runtime.mkdir(mode=0o700)
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = str(runtime)
    flags = ["-np", "3", "--max-np", "4", "-H", "localhost:2,127.0.0.1:2", "--page=127.0.0.1:0"]
    flags += ["--events", str(folder / "events.jsonl"), "--checkpoint", str(folder / "checkpoints")]
    flags += ["--checkpoint-every", "300steps"]
    words = ["--epochs", "1000000", "--stop", str(folder / "stop"), "--samples", "6000", "--item-ms", "2", "--log"]
    try:
        with (
            RunningJob(flags, ELASTIC_JOB, words, folder, folder / "output") as job,
            playwright.sync_playwright() as driver,
        ):
            url = _url(folder / "output")
            browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            errors: list[str] = []
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
            page.add_init_script(WATCH_EVENTS)
            page.goto(url)
            latest = job.wait_until(all_training(3), 60)
            _wait_until(page, "document.getElementById('workers').children.length == 3")
            _pause_for_picture(page, 15)
            page.evaluate("window.latenciesMs = []")
            job.kill(latest[1]["pid"])
            page.wait_for_selector("#events li[data-name=WorkerLost]", timeout=DEADLINE_MS)
            page.wait_for_selector("#generations details[data-number='3'] [data-phase=total]", state="attached")
            job.wait_until(all_training(3), 60)
            _pause_for_picture(page, 8)
            page.fill("#token", farandole("page", "--print-token").stdout.strip())
            page.click("#token-form button")
            page.fill("#size", "4")
            page.click("#scale-form button")
            page.wait_for_selector("#answer:has-text('the job will have 4 workers instead of 3')")
            page.wait_for_selector("#generations details[data-number='4'] [data-phase=total]", state="attached")
            job.wait_until(all_training(4), 60)
            _wait_until(page, "document.getElementById('workers-now').textContent == '4'")
            _wait_for_curves(page)
            status = json.loads(farandole("status", "--json").stdout)
            _take_pictures(browser, url, page)
            yield Seen(browser, page, url, _told(folder), status, page.evaluate("window.latenciesMs"), errors)
            (folder / "stop").touch()
            assert job.wait(60) == 0, (folder / "output").read_text()
            page.wait_for_selector("#contact:has-text('the job has ended')")
            browser.close()
    finally:
        if before is None:
            del os.environ["XDG_RUNTIME_DIR"]
        else:
            os.environ["XDG_RUNTIME_DIR"] = before


def _url(output: Path) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if output.exists() and (found := re.search(r"page: (http://\S+)", output.read_text())):
            return found[1]
        time.sleep(0.05)
    raise TimeoutError(output.read_text())


def _told(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def _wait_until(page: Any, expression: str) -> None:
    """Wait until it is true in the page. (Playwright's wait_for_function() evaluates a string inside of the page, which
    the page's Content-Security-Policy does not allow.)"""
    deadline = time.monotonic() + DEADLINE_MS / 1000
    while not page.evaluate(expression):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{expression}: {page.inner_text('body')}")
        page.wait_for_timeout(50)


def _wait_for_curves(page: Any) -> None:
    _wait_until(page, "document.querySelectorAll('#values .curve[d]').length == 2")


def _pause_for_picture(page: Any, seconds: float) -> None:
    """Let the job train for a while, for curves that show something."""
    if os.environ.get("PAGE_PICTURES"):
        page.wait_for_timeout(1000 * seconds)


def _take_pictures(browser: Any, url: str, page: Any) -> None:
    folder = os.environ.get("PAGE_PICTURES")
    if not folder:
        return
    _pause_for_picture(page, 10)
    page.click("#generations details[data-number='2'] summary")
    for scheme, width, height in (("light", 1280, 1820), ("dark", 1280, 1820), ("phone", 390, 844)):
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        page.evaluate("window.scrollTo(0, 0)")
        page.wait_for_timeout(1500)
        page.screenshot(path=Path(folder) / f"page-{scheme}.png")
    page.set_viewport_size({"width": 1280, "height": 900})
    page.emulate_media(color_scheme="light")
    page.click("#generations details[data-number='2'] summary")


def _line(told: dict[str, Any]) -> str:
    """The text of an event in the file of --events."""
    values = {name: value for name, value in told.items() if name not in ("event", "time", "clock_s", "level")}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return KINDS[told["event"]](**values).line()


def test_the_page_shows_all_events_of_the_job_in_their_order(seen: Seen) -> None:
    items = seen.page.evaluate(
        "[...document.querySelectorAll('#events li')].map(item => "
        "[item.dataset.name, item.querySelector('.line').textContent, item.className])"
    )
    shown = [(name, line, level) for name, line, level in reversed(items)]
    told = [(each["event"], _line(each), each["level"]) for each in seen.told]
    shown = shown[: len(told)]  # a checkpoint may have been saved since
    assert sorted(shown) == sorted(told)
    decisions = ("GenerationStarted", "WorkerLost", "WorkerSpawned", "Recovered", "RegroupBegan", "ScaleChanged")
    assert [each for each in shown if each[0] in decisions] == [each for each in told if each[0] in decisions]
    assert {"WorkerLost", "ScaleChanged", "Recovered"} <= {name for name, _, _ in shown}
    assert seen.errors == []


def test_each_recovery_opens_into_its_phases(seen: Seen) -> None:
    recoveries = {each["number"]: each for each in seen.told if each["event"] == "Recovered"}
    assert recoveries.keys() >= {2, 3, 4}
    for number, recovered in recoveries.items():
        seen.page.click(f"#generations details[data-number='{number}'] summary")
        for phase in ("ready", "connected", "synced", "first_step", "total"):
            cell = seen.page.locator(f"#generations details[data-number='{number}'] [data-phase={phase}]")
            assert cell.is_visible()
            shown, unit = cell.inner_text().split()
            shown_ms = float(shown) * (1000 if unit == "s" else 1)
            assert shown_ms == pytest.approx(recovered[f"{phase}_ms"], rel=0.06, abs=0.51), (number, phase)


def test_the_generations_are_saved_as_a_trace(seen: Seen, tmp_path: Path) -> None:
    with seen.page.expect_download() as download:
        seen.page.click("#save-trace")
    download.value.save_as(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    check(trace)
    lanes = lanes_of(trace)
    lost = next(each for each in seen.told if each["event"] == "WorkerLost")["worker"]
    assert f"generation 2: 2 workers, without {lost}" in [title for title, *_ in lanes["generations"]]
    assert len(lanes[lost]) == 1
    assert sum(title == "recovery" for title, *_ in lanes["regroups"]) == 1


def test_the_page_shows_the_workers_of_the_status(seen: Seen) -> None:
    members = seen.status["members"]
    _wait_until(seen.page, "document.getElementById('checkpoint').textContent.startsWith('step ')")
    _wait_until(
        seen.page, "[...document.querySelectorAll('#workers tr')].every(row => row.textContent.includes('waits'))"
    )
    rows = seen.page.evaluate(
        "[...document.querySelectorAll('#workers tr')].map(row => [...row.children].map(cell => cell.textContent))"
    )
    assert [(row[0], row[1]) for row in rows] == [(str(each["rank"]), each["worker"]) for each in members]
    assert all("waits" in row[3] and "MB" in row[4] for row in rows), rows
    assert "Ring of 4 workers: 2 on localhost, 2 on 127.0.0.1" in seen.page.text_content("#ring-picture")
    assert "of 6,000 samples, each trained exactly once" in seen.page.inner_text("#trained-of")
    redone = [each for each in seen.told if each["event"] == "Recovered" and each["steps_redone"]]
    if redone:
        assert f"{sum(each['samples_redone'] for each in redone)} samples" in seen.page.inner_text("#redone")


def test_an_event_is_on_the_page_soon(seen: Seen) -> None:
    late = seen.latencies_ms
    print(f"events on the page: {len(late)}, median {statistics.median(late):.0f} ms, latest {max(late):.0f} ms")
    assert len(late) > 10
    assert statistics.median(late) <= 200


def test_the_first_paint_comes_soon(seen: Seen) -> None:
    """While the four workers of the job use the cores, too."""
    with served_page() as url:
        paints = sorted(load(seen.browser, url).paint_ms for _ in range(10))
    print(f"first paint: {', '.join(f'{each:.0f}' for each in paints)} ms")
    assert statistics.median(paints) <= 200, paints


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390)])
def test_nothing_violates_the_rules_of_accessibility(seen: Seen, scheme: str, width: int) -> None:
    context = seen.browser.new_context(
        color_scheme=scheme, viewport={"width": width, "height": 900}, bypass_csp=True, reduced_motion="reduce"
    )
    page = context.new_page()
    page.goto(seen.url)
    _wait_for_curves(page)
    for details in page.locator("details").all():
        details.evaluate("each => { each.open = true; }")
    page.wait_for_timeout(500)
    found = axe.Axe().run(page).response["violations"]
    assert [(each["id"], each["nodes"][0]["html"], each["nodes"][0]["failureSummary"]) for each in found] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    context.close()


def test_everything_is_reached_with_the_keyboard(seen: Seen) -> None:
    context = seen.browser.new_context()
    page = context.new_page()
    page.goto(seen.url)
    _wait_for_curves(page)
    reached = set()
    for _ in range(80):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.localName"))
    assert {"only-warnings", "summary", "token", "a"} <= reached, reached
    context.close()
