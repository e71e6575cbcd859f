"""A worker that cannot hear its agent any more ends, and says why."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.base.env import WorkerEnv, environment_of
from farandole.base.wire import frames
from farandole.base.wire.link_messages import Abort, Prepare
from farandole.base.wire.message import Message
from tests.support.waiting import DEADLINE_S

PROGRAM = """
import threading
from farandole.base.env import read_worker_env
from farandole.base.membership import DataAddress
from farandole.training.worker.worker_recovery import AbortRegistry
from farandole.training.worker.link import Link

class Blocked:
    def abort(self, reason):
        print("aborted:", reason, flush=True)

def fail(*_):
    raise RuntimeError("a fault in the thread")

aborts, blocked = AbortRegistry(), Blocked()
aborts.register(1, blocked)
link = Link(read_worker_env(), aborts)
link.on_prepare = fail
link.open(read_worker_env(), DataAddress("127.0.0.1", 1))
threading.Event().wait()
"""


class Worker:
    """The program above, and its agent's end of the link."""

    def __init__(self, folder: Path) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "agent"))
            listener.listen()
            listener.settimeout(DEADLINE_S)
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM],
                env={**os.environ, **environment_of(WorkerEnv(str(folder / "agent"), "w1", "secret", 0))},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                text=True,
            )
            self._connection, _ = listener.accept()

    def tell(self, message: Message) -> None:
        self._connection.sendall(frames.frame(frames.encode(message)))

    def hang_up(self) -> None:
        self._connection.close()

    def ended(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out, err

    def close(self) -> None:
        self._connection.close()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    started = Worker(tmp_path)
    try:
        yield started
    finally:
        started.close()


def test_a_fault_in_the_links_thread_ends_the_worker_with_a_traceback(worker: Worker) -> None:
    worker.tell(Abort(2, "a test"))
    worker.tell(Prepare(3, "a test"))
    exit_code, out, err = worker.ended()
    assert exit_code == -signal.SIGKILL
    assert out == "aborted: a test\n"
    assert "its link to the agent failed; ending the worker" in err
    assert err.rstrip().endswith("RuntimeError: a fault in the thread")


def test_a_worker_whose_stderr_nobody_reads_ends_with_its_agent_all_the_same(worker: Worker) -> None:
    assert worker.process.stderr is not None
    worker.process.stderr.close()
    worker.hang_up()
    assert worker.process.wait(DEADLINE_S) == -signal.SIGKILL
