"""A process with thousands of open files: whatever it opens next has a number that select() does not take."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.job.agent import fork_server_process
from farandole.job.agent.guard import Guard
from farandole.job.launch.output import write_all
from farandole.training.collectives.alone import AloneTransport
from tests.integration.test_p2p import p2p_group
from tests.support.thread_world import ThreadWorld

DEADLINE_S = 20.0
_LIMIT = 1024


@pytest.fixture(autouse=True)
def many_are_open() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * _LIMIT
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"no process may open more than {hard} files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    opened = [os.open(os.devnull, os.O_RDONLY)]
    while opened[-1] < _LIMIT:
        opened.append(os.dup(opened[0]))
    try:
        yield
    finally:
        for each in opened:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_large_letters_are_sent() -> None:
    content = bytes(30_000_000)  # more than the kernel takes at once
    with p2p_group(2) as (one, other):
        one.send(1, b"large", content)
        assert other.receive(0, b"large") == content


def test_who_waits_alone_is_woken() -> None:
    woken, wake = socket.socketpair()
    with woken, wake:
        wake.send(b"\0")
        assert AloneTransport().wait_for_peer(woken.fileno()) is False


def test_a_rank_of_a_thread_world_is_woken() -> None:
    woken, wake = socket.socketpair()
    with woken, wake:
        wake.send(b"\0")
        assert ThreadWorld(1).transports[0].wait_for_peer(woken.fileno()) is False


def test_a_guard_is_told_that_its_agent_is_not_stopped(tmp_path: Path) -> None:
    guard = Guard(tmp_path, 100.0)
    guard.start()
    try:
        guard.heartbeat()
    finally:
        guard.stop()


def test_output_waits_for_a_terminal_that_takes_no_more() -> None:
    text = bytes(1_000_000)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    received: list[bytes] = []
    with open(reading, "rb") as reader:
        thread = threading.Thread(target=lambda: received.append(reader.read()))
        thread.start()
        with open(writing, "wb", buffering=0) as writer:
            write_all(writer, text)
        thread.join(DEADLINE_S)
    assert received == [text]


def test_a_fork_server_sees_to_its_agent_while_it_imports(tmp_path: Path) -> None:
    """Its channel has the number that it had in the agent."""
    importing = "import subprocess, sys; subprocess.run([sys.executable, '-c', '']); raise ImportError('not here')"
    (tmp_path / "torch.py").write_text(importing)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        words = [str(theirs.fileno()), "0", str(os.getpid()), str(tmp_path / "script.py")]
        with subprocess.Popen(
            [sys.executable, fork_server_process.__file__, *words], pass_fds=(theirs.fileno(),)
        ) as server:
            theirs.close()
            ours.settimeout(DEADLINE_S)
            assert ours.recv(1000) == b"ImportError: not here"
        assert server.returncode == 1
