"""What a worker stores in its page is what its agent reads there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.base.liveness import status_reporting
from farandole.base.liveness.status_reporting import (
    PAGE_BYTES,
    STACKS_AT,
    InPhase,
    OwnStatusPage,
    StatusPage,
    WaitingForPeers,
)
from farandole.base.membership import Phase, WorkerStatus

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages for workers are made with Linux's memfd")

DEADLINE_S = 20.0


def run(page: StatusPage, code: str) -> str:
    """In a process of its own that has the page: its last line."""
    begin = (
        "import os, sys, threading\nfrom farandole.base.liveness import status_reporting\n"
        "from farandole.base.membership import Phase\n"
    )
    begin += "status_reporting.open_status_page(sys.argv[1], gives_exit_notice=False)\n"
    done = subprocess.run(
        [sys.executable, "-c", begin + code, page.path], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    return done.stdout


def test_nothing_is_seen_before_the_worker_says_something() -> None:
    assert StatusPage().look() is None


def test_what_is_stored_is_seen() -> None:
    page = StatusPage()
    own = OwnStatusPage(page.path)
    own.set_phase(Phase.WAITING)
    own.set_step(3, 41)
    assert page.look() == WorkerStatus(2, 3, 41, Phase.WAITING)
    own.report_progress()
    assert page.look() == WorkerStatus(3, 3, 41, Phase.WAITING)


def test_nonsense_is_not_seen() -> None:
    page = StatusPage()
    own = OwnStatusPage(page.path)
    own.set_phase(77)
    assert page.look() is None


def test_a_page_cannot_be_made_shorter_by_the_worker() -> None:
    page = StatusPage()
    own = OwnStatusPage(page.path)
    with pytest.raises(PermissionError):
        os.ftruncate(own.descriptor, 0)


def test_stacks_stand_in_the_page_as_far_as_they_fit() -> None:
    page = StatusPage()
    own = OwnStatusPage(page.path)
    assert page.stacks() == ""
    os.write(own.descriptor, b"Thread 1\n")
    os.write(own.descriptor, b"Thread 2\n")
    assert page.stacks() == "Thread 1\nThread 2\n"
    text = b"x" * (PAGE_BYTES - STACKS_AT - 18)
    assert os.write(own.descriptor, text) == len(text)
    with pytest.raises(OSError, match="not permitted"):
        os.write(own.descriptor, b"x")
    assert len(page.stacks()) == PAGE_BYTES - STACKS_AT


def test_of_several_dumps_the_newest_one_is_read_and_the_memory_of_the_others_is_freed() -> None:
    page = StatusPage()
    own = OwnStatusPage(page.path)
    os.write(own.descriptor, b"a long one\n" * 10_000)
    assert page.begin_dump()
    assert page.stacks() == ""
    os.write(own.descriptor, b"a short one\n")
    assert page.stacks() == "a short one\n", "of the older one nothing is behind it"
    assert page.begin_dump()
    os.write(own.descriptor, b"another\n")
    assert page.stacks() == "another\n"
    held = os.stat(page.path.partition("#")[0]).st_blocks * 512
    assert held <= 4 * 4096
    own.set_step(3, 41)
    assert page.look() is not None, "the head of the page is what it was"


def test_a_page_that_is_full_of_dumps_says_so() -> None:
    page = StatusPage()
    own = OwnStatusPage(page.path)
    os.lseek(own.descriptor, PAGE_BYTES - 1000, os.SEEK_SET)
    text = b"x" * 1000
    page.memory[STACKS_AT : PAGE_BYTES - 1000] = b"y" * (PAGE_BYTES - 1000 - STACKS_AT)
    assert os.write(own.descriptor, text) == len(text)
    assert not page.begin_dump()
    assert page.stacks() == ""


def test_a_closed_page_cannot_be_opened_any_more() -> None:
    page = StatusPage()
    path = page.path
    page.close()
    with pytest.raises(FileNotFoundError):
        OwnStatusPage(path)


def test_another_file_in_the_place_of_a_page_is_not_written_to(tmp_path: Path) -> None:
    page = StatusPage()
    path = page.path
    page.close()
    with (tmp_path / "other").open("w+b") as other:
        number = path.partition("#")[0].rpartition("/")[2]
        descriptor = other.fileno() if other.fileno() == int(number) else os.dup2(other.fileno(), int(number))
        with pytest.raises(FileNotFoundError, match="another file"):
            OwnStatusPage(path)
        if descriptor != other.fileno():
            os.close(descriptor)
    assert (tmp_path / "other").read_bytes() == b""


def test_pages_that_come_and_go_leave_nothing_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        page = StatusPage()
        page.look()
        page.close()
        del page
    assert len(os.listdir("/proc/self/fd")) == before


def test_phases_end_with_the_one_before_also_after_an_error() -> None:
    page = StatusPage()
    code = """
status_reporting.set_phase(Phase.USER)
try:
    with status_reporting.InPhase(Phase.REGROUPING):
        with status_reporting.WaitingForPeers():
            with status_reporting.WaitingForPeers():
                print(status_reporting.OWN.phase.name)
        print(status_reporting.OWN.phase.name)
        raise KeyError
except KeyError:
    print(status_reporting.OWN.phase.name)
"""
    assert run(page, code).split() == ["WAITING", "REGROUPING", "USER"]
    seen = page.look()
    assert seen is not None
    assert seen.phase is Phase.USER


def test_what_other_threads_wait_for_is_not_where_the_worker_is() -> None:
    page = StatusPage()
    code = """
status_reporting.set_phase(Phase.USER)
def wait():
    with status_reporting.WaitingForPeers():
        print(status_reporting.OWN.phase.name)
thread = threading.Thread(target=wait)
thread.start()
thread.join()
"""
    assert run(page, code).split() == ["USER"]


def test_a_loader_process_does_not_say_where_its_worker_is() -> None:
    page = StatusPage()
    code = """
status_reporting.set_phase(Phase.USER)
if os.fork() == 0:
    status_reporting.set_phase(Phase.WAITING)
    status_reporting.set_step(9, 9)
    os._exit(0)
os.wait()
"""
    run(page, code)
    assert page.look() == WorkerStatus(2, 0, 0, Phase.USER)


def test_a_page_that_is_not_there_takes_nothing_from_the_worker() -> None:
    code = "import sys\nfrom farandole.base.liveness import status_reporting\n"
    code += "status_reporting.open_status_page('/proc/self/fd/99', gives_exit_notice=True)\n"
    code += "print(status_reporting.set_phase(1))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert done.stdout.split() == ["0"]


def test_without_a_page_everything_may_be_said() -> None:
    with InPhase(Phase.USER), WaitingForPeers():
        status_reporting.set_step(1, 2)
        status_reporting.report_progress()
    assert status_reporting.set_phase(Phase.OUTSIDE) is Phase.OUTSIDE


def test_a_store_costs_some_microseconds_at_most() -> None:
    """CPU time, so that a busy machine does not matter much; the bound is ten times what was measured."""
    page = StatusPage()
    code = """
import json, time
n = 20000
begin = time.process_time()
for _ in range(n):
    with status_reporting.WaitingForPeers():
        pass
waiting = time.process_time() - begin
begin = time.process_time()
for _ in range(n):
    status_reporting.set_step(1, 2)
print(json.dumps([waiting / n, (time.process_time() - begin) / n]))
"""
    waiting_s, place_s = json.loads(run(page, code))
    assert waiting_s < 10e-6
    assert place_s < 2e-6
