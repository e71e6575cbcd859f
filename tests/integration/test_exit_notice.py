"""Deaths that are known before their exits: robust mutexes in shared memory, and who waits for them."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from farandole.base.liveness import exit_notice
from farandole.base.liveness.status_reporting import MUTEX_AT, StatusPage
from farandole.job.agent.worker_server import ExitWatcher
from tests.support.jobs import SCRIPTS, farandole_run

pytestmark = pytest.mark.skipif(
    not exit_notice.is_supported(), reason="no robust mutexes here that could be waited for"
)

DEADLINE_S = 10.0
HURT_JOB = SCRIPTS / "hurt_job.py"

OPEN_PAGE = """
import os, signal, sys, threading, ctypes
from farandole.base.liveness import status_reporting
status_reporting.open_status_page(sys.argv[1], gives_exit_notice=True)
"""


@contextmanager
def process(page: StatusPage, then: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has a page, and has said so."""
    code = f"{OPEN_PAGE}print('open', flush=True)\n{then}"
    with subprocess.Popen([sys.executable, "-c", code, page.path], stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            assert running.stdout.readline() == "open\n"
            yield running
        finally:
            running.kill()


@contextmanager
def watching(page: StatusPage) -> Iterator[queue.Queue[str]]:
    marks: queue.Queue[str] = queue.Queue()
    watch = ExitWatcher(marks.put)
    watch.start()
    watch.watch("w0", page.memory, MUTEX_AT)
    try:
        yield marks
    finally:
        watch.stop()


def test_the_death_of_a_process_is_hinted_at_before_it_is_reaped() -> None:
    page = StatusPage()
    with watching(page) as marks, process(page, "signal.pause()") as running:
        assert marks.empty()
        os.kill(running.pid, signal.SIGKILL)
        assert marks.get(timeout=DEADLINE_S) == "w0"
        assert exit_notice.is_main_thread_ending(running.pid)
        assert running.wait(DEADLINE_S) == -signal.SIGKILL


def test_a_process_that_is_watched_from_later_on_is_hinted_at_too() -> None:
    page = StatusPage()
    with process(page, "signal.pause()") as running:
        os.kill(running.pid, signal.SIGKILL)
        running.wait(DEADLINE_S)
    with watching(page) as marks:
        assert marks.get(timeout=DEADLINE_S) == "w0"


def test_a_child_that_was_forked_neither_hints_nor_hides_the_hint() -> None:
    child = """
if os.fork() == 0:
    os._exit(0)
os.wait()
if os.fork() == 0:
    signal.alarm(10)
    signal.pause()
print('forked', flush=True)
signal.pause()
"""
    page = StatusPage()
    with watching(page) as marks, process(page, child) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "forked\n"
        assert marks.empty()
        os.kill(running.pid, signal.SIGKILL)
        assert marks.get(timeout=DEADLINE_S) == "w0"


def test_a_hint_from_a_process_that_lives_is_found_out() -> None:
    """As far as the kernel goes a mutex is marked when its thread ends; a script may scribble over anything."""
    page = StatusPage()
    scribble = "status_reporting.OWN.page.memory[64:68] = (1 << 30).to_bytes(4, 'little'); signal.pause()"
    with watching(page) as marks, process(page, scribble) as running:
        assert exit_notice.is_main_thread_ending(running.pid) is False
        assert marks.get(timeout=DEADLINE_S) == "w0"  # at its slice at the latest
        assert exit_notice.is_main_thread_ending(running.pid) is False


def test_a_thread_that_opens_a_page_says_nothing() -> None:
    page = StatusPage()
    code = "import sys, threading\nfrom farandole.base.liveness import status_reporting\n"
    code += "open_page, notice = status_reporting.open_status_page, {'gives_exit_notice': True}\n"
    code += "t = threading.Thread(target=open_page, args=(sys.argv[1],), kwargs=notice)\n"
    code += "t.start(); t.join()"
    subprocess.run([sys.executable, "-c", code, page.path], check=True, timeout=DEADLINE_S)
    assert page.look() is None
    assert page.memory[MUTEX_AT] == 0


def test_exits_are_reported_as_they_were_whatever_was_hinted() -> None:
    """The rest of a process whose main thread has ended is killed with it; one that lives is left alone."""
    acts = ("0:1:scribble", "1:2:segfault", "2:5:exit", "3:8:sys-exit", "4:11:half")
    at = [word for act in acts for word in ("--at", act)]
    done = farandole_run("-np", "5", "--restarts", "0", sys.executable, str(HURT_JOB), *at)
    assert done.returncode == 0, done.stderr
    ends = ("was killed by SIGSEGV (signal 11)", "exited with code 5", "exited with code 6", "was killed by SIGKILL")
    lines = [line for line in done.stderr.splitlines() if "recovered in" in line]
    phases = (
        r" ms from .*: noticed by the end of its main thread, ready \d+, connected \d+, synced \d+, first step \d+; "
    )
    assert all(re.search(phases, line) for line in lines)
    recovered = "\n".join(lines)
    for slot, how in enumerate(ends, start=1):
        assert f"lost w{slot} (slot {slot}): it {how}" in done.stderr
        assert f"w{slot} (slot {slot}) is dying" in done.stderr
        assert f"w{slot}, which {how}" in recovered
