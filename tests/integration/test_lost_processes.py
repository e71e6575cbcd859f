"""kill -9 of one of four processes in the middle of an all-reduce, while a forked child of it lives on."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

RANK_SCRIPT = Path(__file__).parent.parent / "scripts" / "ring_rank.py"
SIZE, VICTIM = 4, 1
DEADLINE_S = 30.0


class RankProcess:
    """A process of the ring, and the lines it says."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(RANK_SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def hear(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def tell(self, **what: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def ranks() -> Iterator[list[RankProcess]]:
    started = [RankProcess() for _ in range(SIZE)]
    yield started
    for each in started:
        each.end()


@pytest.mark.timeout(60)  # every line that is read comes, or this ends the wait
def test_a_kill_reaches_all_survivors_at_once_also_those_that_are_no_neighbours(
    ranks: list[RankProcess],
) -> None:
    addresses = [(line["host"], line["port"]) for line in (each.hear() for each in ranks)]
    key = secrets.token_hex(32)
    for rank, each in enumerate(ranks):
        each.tell(rank=rank, addresses=addresses, key=key, forks=rank == VICTIM)
    children = [line["child"] for line in (each.hear() for each in ranks)]
    killed_s = time.monotonic()
    ranks[VICTIM].process.kill()
    try:
        ends = [each.hear() for rank, each in enumerate(ranks) if rank != VICTIM]
        os.kill(children[VICTIM], 0)  # alive: the victim's sockets were closed in it, not by its end
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(children[VICTIM], signal.SIGKILL)
    print("ms from the kill to the error:", [round((end["failed_s"] - killed_s) * 1e3, 1) for end in ends])
    assert [end["error"] for end in ends] == ["PeerLost"] * (SIZE - 1), ends
    assert max(end["failed_s"] for end in ends) - killed_s < 1.0


def test_a_forked_child_closes_the_sockets_that_it_must_not_keep(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal, socket, sys
            from farandole.base.machine import close_at_fork

            sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
            file = sock.makefile("rb")  # keeps the descriptor open over sock.close()
            gone = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
            for each in (sock, gone):
                close_at_fork(each)
            gone.close()
            descriptor = sock.fileno()
            child = os.fork()
            if child == 0:
                try:
                    os.fstat(descriptor)
                    print("kept", os.getpid(), flush=True)
                except OSError:
                    print("closed", os.getpid(), flush=True)
                signal.alarm(30)
                signal.pause()
            sock.send(b"parent still connected")
            signal.pause()
            """
        )
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(DEADLINE_S)
        command = [sys.executable, str(script), str(server.getsockname()[1])]
        parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(DEADLINE_S)
                assert connection.recv(100) == b"parent still connected"
                assert parent.stdout is not None
                fate, child = parent.stdout.readline().split()
                assert fate == "closed"
                parent.kill()
                try:
                    assert connection.recv(100) == b""
                finally:
                    os.kill(int(child), signal.SIGKILL)
        finally:
            parent.kill()
            parent.communicate()
