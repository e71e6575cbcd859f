"""What the tests of the fork server run as a worker. FARANDOLE_TEST says what it does."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any


def tell() -> None:
    """Whatever a script can see of how it was started."""
    names = globals()
    for name in ("__name__", "__file__", "__cached__", "__package__", "__doc__", "__annotations__"):
        print(name, names[name])
    print(
        getattr(names["__spec__"], "name", None),
        type(names["__loader__"]).__name__,
        names["__builtins__"],
        sorted(vars(sys.modules["__main__"]))[:8],
    )
    print(sys.argv, sys.orig_argv[1:], sys.path, sys.flags, sys.warnoptions, sys.executable)
    variables = {name: value for name, value in os.environ.items() if name != "FARANDOLE_SECRET"}
    print(sorted(variables.items()))
    print(os.getcwd(), os.getpriority(os.PRIO_PROCESS, 0), gc.isenabled(), sys.stdin, sys.stdout, sys.stderr)
    print(sys.stdout.line_buffering, sys.stdout.write_through, os.isatty(1))
    print(os.getsid(0) == os.getpgrp() == os.getpid(), os.getppid() == int(os.environ["FARANDOLE_AGENT_PID"]))
    print(sorted(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
    print([(each.name, str(signal.getsignal(each))) for each in signal.Signals if each.name != "SIGKILL"][:31])
    print(signal.pthread_sigmask(signal.SIG_BLOCK, []), threading.current_thread() is threading.main_thread())
    print(multiprocessing.current_process().name, multiprocessing.parent_process())
    print("to stderr", file=sys.stderr)


def draw() -> None:
    """Random numbers, none of which another worker may draw."""
    import numpy
    import torch

    print(random.random(), flush=True)
    print(numpy.random.rand())
    print(torch.rand(1).item())
    print(bytes(multiprocessing.current_process().authkey).hex())


def load() -> None:
    """Loader workers, by all ways to start a process."""
    import torch

    for method in ("fork", "spawn", "forkserver"):
        loader = torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context=method)
        print(method, sum(int(batch.sum()) for batch in loader))
    print(torch.cuda.is_initialized(), torch.ones(300, 300).mm(torch.ones(300, 300)).sum().item())


class Numbers:
    """A data set that a spawned process can only find in a `__main__` with a file."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return index


def leave_orphans() -> None:
    """Whether processes that escape, in sessions of their own, become children of the agent."""
    for _ in range(5):
        leave = ["sh", "-c", "setsid sleep 60 >/dev/null 2>&1 & echo $!"]
        orphan = int(subprocess.run(leave, stdout=subprocess.PIPE, check=True).stdout)
        parent = Path(f"/proc/{orphan}/stat").read_text().rpartition(")")[2].split()[1]
        print(parent == os.environ["FARANDOLE_AGENT_PID"])
        os.kill(orphan, signal.SIGKILL)


def fail() -> None:
    """A traceback; then what a Python does at its end."""
    threading.Thread(target=lambda: print("the thread ends")).start()
    atexit.register(lambda: print("at exit"))
    try:
        {}["key"]
    except KeyError as error:
        raise ValueError("boom") from error


def fail_in_hook() -> None:
    def hook(*_: Any) -> None:
        raise TypeError("in the hook")

    sys.excepthook = hook
    raise ValueError("boom")


def interrupted() -> None:
    atexit.register(lambda: print("at exit"))
    raise KeyboardInterrupt


def main() -> None:
    doings = {each.__name__: each for each in (tell, draw, load, leave_orphans, fail, fail_in_hook, interrupted)}
    what = os.environ["FARANDOLE_TEST"]
    if what in doings:
        doings[what]()
    elif what == "message":
        sys.exit("a message")
    elif what == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    else:
        sys.exit(int(what))


if __name__ == "__main__":
    main()
