"""The first process of a host: it sets the host's own name and folders, reaps orphans, and ends when the lab ends.

A separate script, with the standard library only: host.py starts it in the host's new namespaces. Its arguments are the
host's name, the file for its /etc/hosts, and the number after which its process ids begin: no two processes of the host
have the same, not even before and after it was off. It prints its process id outside of the host on stdout once all is
done. The lab holds the other end of stdin: when that closes the lab is gone, however it died, and so is the host: the
kernel kills all processes in a namespace whose first process has ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path


def main(name: str, hosts_file: str, last_pid: str) -> None:
    number = os.readlink("/proc/self")  # still the machine's /proc
    socket.sethostname(name)
    mount("-t", "proc", "proc", "/proc")
    mount("-t", "tmpfs", "tmpfs", "/dev/shm")
    mount("--bind", hosts_file, "/etc/hosts")
    with contextlib.suppress(OSError):  # a kernel that cannot continue stopped containers
        Path("/proc/sys/kernel/ns_last_pid").write_text(last_pid)
    awake, wake = os.pipe()
    os.set_blocking(awake, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    os.write(1, f"{number}\n".encode())
    while True:
        readable, _, _ = select.select([0, awake], [], [])
        if 0 in readable and not os.read(0, 4096):
            return
        with contextlib.suppress(BlockingIOError):
            os.read(awake, 4096)
        reap()


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"mount {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()}")


def reap() -> None:
    """Reap ended processes: every process without a parent is a child of this process."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    main(*sys.argv[1:])
