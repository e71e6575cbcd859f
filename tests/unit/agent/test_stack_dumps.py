"""Workers write the stacks of their threads again and again, whatever they execute, or it is said why not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from farandole.base.liveness.status_reporting import StatusPage
from farandole.job.agent.process import is_stopped
from farandole.job.agent.stack_dumps import Dump, StackDumps
from tests.support.waiting import run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages for workers are made with Linux's memfd")

CODE = """
import ctypes, os, sys, threading
from farandole.base.liveness.status_reporting import open_status_page
open_status_page(sys.argv[1], gives_exit_notice=False)
def in_another_thread():
    threading.Event().wait()
def holds_the_interpreter():
    print("ready", flush=True)
    ctypes.PyDLL(None).pause()
def waits_for_a_lock():
    print("ready", flush=True)
    threading.Event().wait()
def becomes_another_program():
    print("ready", flush=True)
    os.execvp("sleep", ["sleep", "60"])
threading.Thread(target=in_another_thread, daemon=True).start()
globals()[sys.argv[2]]()
"""


@contextmanager
def worker(page: StatusPage, act: str) -> Iterator[int]:
    """The process of a worker that hangs in this function."""
    command = [sys.executable, "-c", CODE, page.path, act]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process.pid
        finally:
            process.kill()


def test_a_worker_that_waits_is_asked_again_and_again() -> None:
    page = StatusPage()
    with worker(page, "waits_for_a_lock") as pid:
        dumps = StackDumps(lambda _: page, lambda _: pid)
        for _ in range(3):
            dump = run(dumps.dump("w0"))
            assert dump.problem == ""
            assert dump.text.count("in waits_for_a_lock") == dump.text.count("in in_another_thread") == 1, dump.text


def test_a_worker_that_holds_the_interpreter_is_seen_too() -> None:
    """Its signal interrupts pause(2), after which it ends: one dump is all that there can be."""
    page = StatusPage()
    with worker(page, "holds_the_interpreter") as pid:
        assert "in holds_the_interpreter" in run(StackDumps(lambda _: page, lambda _: pid).dump("w0")).text


def test_a_stopped_worker_is_told_apart_and_writes_once_when_it_goes_on() -> None:
    page = StatusPage()
    with worker(page, "waits_for_a_lock") as pid:
        dumps = StackDumps(lambda _: page, lambda _: pid)
        os.kill(pid, signal.SIGSTOP)
        while not is_stopped(pid):
            time.sleep(0.001)
        for _ in range(2):
            dump = run(dumps.dump("w0", within_s=0.2))
            assert dump == Dump("", "it did not write them within 0.2 s: a signal has stopped its process")

        async def asked_before_it_goes_on() -> Dump:
            asked = asyncio.create_task(dumps.dump("w0"))
            await asyncio.sleep(0.05)  # the signals of all three requests are one that is pending
            os.kill(pid, signal.SIGCONT)
            return await asked

        assert run(asked_before_it_goes_on()).text.count("in waits_for_a_lock") == 1


@pytest.mark.parametrize("what", ["no page", "no process", "not opened"])
def test_a_worker_that_has_not_called_init_is_not_sent_a_signal_that_would_end_it(what: str) -> None:
    page = None if what == "no page" else StatusPage()
    pid = None if what == "no process" else os.getpid()
    dump = run(StackDumps(lambda _: page, lambda _: pid).dump("w0"))
    assert dump == Dump("", "it has not called init() yet, has ended, or has no status page")


def test_a_process_that_is_gone_is_no_error() -> None:
    page = StatusPage()
    with worker(page, "waits_for_a_lock") as pid:
        pass
    dump = run(StackDumps(lambda _: page, lambda _: pid).dump("w0"))
    assert dump == Dump("", "its process has no handler for the signal, or has ended")


def test_a_process_that_has_become_another_program_is_not_ended_by_the_signal() -> None:
    page = StatusPage()
    with worker(page, "becomes_another_program") as pid:
        while not Path(f"/proc/{pid}/cmdline").read_text().startswith("sleep"):
            time.sleep(0.001)
        dump = run(StackDumps(lambda _: page, lambda _: pid).dump("w0"))
        assert dump == Dump("", "its process has no handler for the signal, or has ended")
        os.kill(pid, 0)
