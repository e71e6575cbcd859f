"""Two hosts on one machine: network namespaces with a cable between them. all_reduce.py measures across them.

Only transports are measured: the workers are started here, without agents, one process for each rank, and meet in a
folder. It takes root.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.jobs import ROOT, wait_for_all
from farandole.collectives import world
from farandole.collectives.listener import DataListener
from farandole.collectives.named.settings import NamedSettings
from farandole.membership import Address, GenerationId, Peer, Placement
from farandole.messages import Start
from farandole.worker.world_builder import WorldBuilder

_DEADLINE_S = 120.0
_MEET_S = 30.0
_CABLE = "frd0"  # its end in either namespace
_ADDRESSES = ("10.213.87.1", "10.213.87.2")


def why_not() -> str | None:
    """Why there cannot be two hosts here; None: there can."""
    if os.geteuid() != 0:
        return "it takes two network namespaces, and those take root"
    if shutil.which("ip") is None:
        return "it takes two network namespaces, and there is no `ip` to make them with"
    return None


def hosts_of(ranks: int) -> list[int]:
    """The host of each rank, the larger half on the first one."""
    return [2 * rank // (ranks + ranks % 2) for rank in range(ranks)]


def run_worker(module: str, ranks: int, transport: str, arguments: Sequence[str]) -> dict[str, Any]:
    """What rank 0 wrote into its `--folder` as result.json. Raises RuntimeError with the output of a rank that failed,
    or took too long."""
    with _two_namespaces() as names, tempfile.TemporaryDirectory(prefix="farandole-bench-") as folder:
        settings = {"FARANDOLE_TRANSPORT": transport, "GLOO_SOCKET_IFNAME": _CABLE}
        processes = [
            subprocess.Popen(
                [
                    *("ip", "netns", "exec", names[host], sys.executable, "-m", f"benchmarks.{module}", *arguments),
                    *("--folder", folder, "--rank", str(rank), "--ranks", str(ranks)),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ROOT,
                env={**os.environ, **settings},
            )
            for rank, host in enumerate(hosts_of(ranks))
        ]
        wait_for_all(processes, _DEADLINE_S)
        return dict(json.loads((Path(folder) / "result.json").read_text()))


def meet(rank: int, ranks: int, folder: Path) -> None:
    """Enter the world of all ranks, as init() does under `farandole run`: called by each of them, on its host."""
    hosts = hosts_of(ranks)
    listener = DataListener(_ADDRESSES[hosts[rank]])
    _publish(folder / f"rank{rank}", msgspec.json.encode(listener.address))
    if rank == 0:
        _publish(folder / "key", os.urandom(32))
    texts = [_read(folder / f"rank{other}") for other in range(ranks)]
    peers = [Peer(f"rank{other}", other, msgspec.json.decode(text, type=Address)) for other, text in enumerate(texts)]
    local, mates = hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])
    start = Start(
        id=GenerationId(lineage=1, incarnation=1, number=1, nonce="benchmark"),
        placement=Placement(rank, ranks, local, mates, hosts[rank], len(set(hosts))),
        previous=peers[rank - 1],
        next=peers[(rank + 1) % ranks],
        founding=True,
        data_key=_read(folder / "key"),
    )
    builder = WorldBuilder(listener, f"rank{rank}", str(hosts[rank]), NamedSettings)
    world.enter(builder.build(start, session=0, timeout_s=_MEET_S).world)


@contextmanager
def _two_namespaces() -> Iterator[tuple[str, str]]:
    names = f"frd-{os.getpid()}-0", f"frd-{os.getpid()}-1"
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", _CABLE, "netns", names[0], "type", "veth", "peer", "name", _CABLE, "netns", names[1])
        for name, address in zip(names, _ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", _CABLE)
            for device in ("lo", _CABLE):
                _ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:  # the cable goes with them
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)} ended with {done.returncode}: {done.stderr.strip()}")


def _publish(path: Path, data: bytes) -> None:
    """Whole, or not there yet."""
    path.with_suffix(".new").write_bytes(data)
    path.with_suffix(".new").rename(path)


def _read(path: Path) -> bytes:
    deadline_s = time.monotonic() + _MEET_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{path.name} did not come within {_MEET_S:g} s")
        time.sleep(0.01)
    return path.read_bytes()
