"""Where workers of a fixed-size launcher meet: who can reach it, and what happens when nobody is there."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from farandole.base.env import FixedEnv
from farandole.base.machine import now_s
from farandole.base.membership import DataAddress
from farandole.errors import ConfigError, JobEnded
from farandole.training.worker.fixed_job import Rendezvous
from tests.support.jobs import SCRIPTS

HERE = DataAddress("127.0.0.1", 1)


def fixed(rank: int, port: int, size: int = 2, local_size: int = 2) -> FixedEnv:
    return FixedEnv("mpirun", rank, size, rank, local_size, 0, 1, "127.0.0.1", port)


def a_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_the_rendezvous_is_open_to_this_machine_only() -> None:
    port = a_free_port()
    rendezvous = Rendezvous(fixed(0, port), timeout_s=10)
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):  # another address of this machine stands for the network
        socket.create_connection(("127.0.0.2", port), timeout=5)
    del rendezvous


def test_a_port_in_use_is_said_by_the_rank_that_wanted_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(JobEnded, match=rf"rank 0 of 2 .* cannot serve .*:{port} .*in use.*MASTER_PORT"):
            Rendezvous(fixed(0, port), timeout_s=5)


def test_a_stranger_that_accepts_and_says_nothing_holds_nobody_for_ever() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        before = now_s()
        with pytest.raises(JobEnded, match=r"rank 1 of 2 .* cannot reach"):
            Rendezvous(fixed(1, stranger.getsockname()[1]), timeout_s=0.3)
        assert now_s() - before < 10


def test_ranks_that_do_not_come_are_named() -> None:
    rendezvous = Rendezvous(fixed(0, a_free_port(), size=4, local_size=4), timeout_s=0.3)
    with pytest.raises(JobEnded, match=r"missing ranks: \[1, 2, 3\]"):
        rendezvous.meet(HERE)


def test_the_store_holds_no_key_and_whoever_changes_an_address_is_refused() -> None:
    """Any user of this machine may read and change torch's store."""
    port = a_free_port()
    ranks = [Rendezvous(fixed(rank, port), timeout_s=20) for rank in range(2)]
    with ThreadPoolExecutor() as pool:
        starts = list(pool.map(lambda rendezvous: rendezvous.meet(HERE), ranks))
    assert starts[0].data_key == starts[1].data_key
    assert len(starts[0].data_key) == 32
    stranger = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
    entries = [stranger.get(f"farandole/0/{name}") for name in ("nonce", "0", "1")]
    assert not any(starts[0].data_key in each or starts[0].data_key.hex().encode() in each for each in entries)

    sealed = stranger.get("farandole/0/1")
    stranger.set("farandole/0/1", sealed.replace(b"127.0.0.1", b"127.0.0.9").decode())
    with pytest.raises(ConfigError, match=r"rank 1 at the rendezvous .* FARANDOLE_TOKEN"):
        ranks[0].meet(HERE)


def test_ranks_with_different_tokens_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    port = a_free_port()
    monkeypatch.setenv("FARANDOLE_TOKEN", "a" * 32)
    first = Rendezvous(fixed(0, port), timeout_s=20)
    monkeypatch.setenv("FARANDOLE_TOKEN", "b" * 32)
    second = Rendezvous(fixed(1, port), timeout_s=20)
    with ThreadPoolExecutor() as pool:
        meetings = [pool.submit(each.meet, HERE) for each in (first, second)]
    for meeting in meetings:
        with pytest.raises(ConfigError, match="FARANDOLE_TOKEN"):
            meeting.result()


def test_workers_on_several_hosts_are_told_that_they_cannot_reach_each_other() -> None:
    rendezvous = Rendezvous(fixed(0, a_free_port(), size=4, local_size=2), timeout_s=5)
    with pytest.raises(ConfigError, match="several hosts are not supported"):
        rendezvous.meet(HERE)


def test_ranks_that_leave_meet_again() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, str(SCRIPTS / "meets_again.py")], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"^RANK (\d) HEARD (.*)$", done.stdout, re.MULTILINE)) == [
        ("0", "[0, 1] [0, 10]"),
        ("1", "[0, 1] [0, 10]"),
    ]
