"""One rank of a ring in a process of its own, for test_lost_processes.py. Says a line of JSON per event.

Reads {"rank", "addresses", "key", "forks"} from stdin after it said where it listens. Reduces 4 MB again and
again until that fails, and says when and how.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from farandole.base.membership import DataAddress
from farandole.errors import RecoverableError
from farandole.training.collectives.data_listener import DataListener
from farandole.training.collectives.ring_builder import RingBuilder
from tests.support.rings import DEADLINE_S, make_start


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    listener = DataListener()
    say(host=listener.address.host, port=listener.address.port)
    orders = json.loads(sys.stdin.readline())
    addresses = [DataAddress(host, port) for host, port in orders["addresses"]]
    start = make_start(orders["rank"], addresses, key=bytes.fromhex(orders["key"]))
    transport = RingBuilder(listener, start, f"w{orders['rank']}", DEADLINE_S).build()
    child = fork_a_child_that_stays() if orders["forks"] else None
    tensor = torch.zeros(1_000_000)
    transport.all_reduce(tensor)
    say(running=True, child=child)
    try:
        while True:
            transport.all_reduce(tensor)
    except RecoverableError as error:
        say(failed_s=time.monotonic(), error=type(error).__name__, text=str(error))


def fork_a_child_that_stays() -> int:
    """As a DataLoader worker does. It must not hold the ring's sockets: the kill of its parent is to be seen."""
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends it, should the test not
        signal.pause()
    return child


if __name__ == "__main__":
    main()
