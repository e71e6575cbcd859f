"""The page of a real job, without a browser: what its feed tells, also of the coordinator's death, and its end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farandole.testing.running_job import all_training
from tests.support.jobs import ELASTIC_JOB, RunningJob, farandole

pytestmark = pytest.mark.long

pytest.importorskip("aiohttp", reason="it needs aiohttp: pip install 'farandole[page]'")
pytest.importorskip("prometheus_client", reason="it needs prometheus_client: pip install 'farandole[page]'")

DEADLINE_S = 60


class Feed:
    """The feed of a page, read to its end. `told` has all messages so far."""

    def __init__(self, url: str) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []
        self._messages = self._read(url)

    def next(self, kind: str, **values: object) -> dict[str, Any]:
        """The next message of this kind with these values."""
        for told, data in self._messages:
            if told == kind and all(data.get(name) == value for name, value in values.items()):
                return data
        raise AssertionError(f"the feed has ended without {kind} {values}: {self.told}")

    def event(self, name: str) -> dict[str, Any]:
        """The next event of this name."""
        while (event := self.next("event")["event"])["name"] != name:
            pass
        return event

    def rest(self) -> None:
        """Read to the end."""
        for _ in self._messages:
            pass

    def _read(self, url: str) -> Iterator[tuple[str, dict[str, Any]]]:
        with urllib.request.urlopen(f"{url}feed", timeout=DEADLINE_S) as stream:
            kind = ""
            for line in stream:
                if line.startswith(b"event: "):
                    kind = line[7:].decode().strip()
                elif line.startswith(b"data: "):
                    self.told.append((kind, json.loads(line[6:])))
                    yield self.told[-1]


def test_a_job_of_torchrun_has_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    words = [str(ELASTIC_JOB), "--epochs", "1000000", "--stop", str(tmp_path / "stop")]
    command = [sys.executable, "-m", "farandole", "torchrun", "--page=127.0.0.1:0", "--nproc-per-node=1", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as job:
        assert job.stderr is not None
        found = next(found for line in job.stderr if (found := re.search(r"page: (\S+)", line)))
        try:
            feed = Feed(found[1])
            while not (status := feed.next("status")["status"]) or not status["step"]:
                pass
        finally:
            (tmp_path / "stop").touch()
        feed.rest()
        told = job.stderr.read()
    assert job.returncode == 0, told
    assert feed.told[-1] == ("contact", {"contact": "ended"})


def test_the_page_tells_all_of_a_job_also_of_its_next_coordinator_and_of_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    words = ["--epochs", "1000000", "--stop", str(tmp_path / "stop"), "--item-ms", "0.3", "--log"]
    flags = ["-np", "1", "--page=127.0.0.1:0", "--events", str(tmp_path / "events.jsonl")]
    with RunningJob(flags, ELASTIC_JOB, words, tmp_path, tmp_path / "output") as job:
        job.wait_until(all_training(1), DEADLINE_S)
        found = re.search(r"page: (\S+)", (tmp_path / "output").read_text())
        assert found is not None
        url = found[1]
        feed = Feed(url)
        picture = feed.next("picture")
        while not (status := feed.next("status")["status"])["values"].keys() >= {"loss", "lr"}:
            pass
        assert (status["samples"], len(status["workers"])) == (600, 1)
        metrics = urllib.request.urlopen(f"{url}metrics", timeout=DEADLINE_S).read().decode()
        assert 'farandole_workers{state="trains"} 1.0' in metrics
        request = urllib.request.Request(f"{url}scale", b'{"size": 1}', method="POST")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(request, timeout=DEADLINE_S)
        request.add_header("Authorization", f"Bearer {farandole('page', '--print-token').stdout.strip()}")
        answer = json.load(urllib.request.urlopen(request, timeout=DEADLINE_S))
        assert answer == {"accepted": "the job already has a target of 1 worker"}

        os.kill(status["coordinator"][0], signal.SIGKILL)
        assert feed.event("CoordinatorRestarted")["level"] == "warning"
        assert feed.next("status")["status"]["coordinator"][1] == 2

        command = [sys.executable, "-m", "farandole", "page", "--listen", "127.0.0.1:0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as own:
            assert own.stdout is not None
            line = own.stdout.readline()
            assert re.search(r"http://127\.0\.0\.1:\d+/#token=[0-9a-f]{32}$", line.strip()), line
            (tmp_path / "stop").touch()
            assert job.wait(DEADLINE_S) == 0
            assert own.stdout.readline() == "the job has ended; the page stays until Ctrl-C\n"
            own.send_signal(signal.SIGINT)
            assert own.wait(DEADLINE_S) == 130
        feed.rest()
        assert feed.told[-1] == ("contact", {"contact": "ended"})
    shown = [each["name"] for each in picture["events"]]
    shown += [data["event"]["name"] for kind, data in feed.told if kind == "event"]
    told = [json.loads(each)["event"] for each in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert sorted(shown) == sorted(told)
