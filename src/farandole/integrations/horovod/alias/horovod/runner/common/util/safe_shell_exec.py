"""A shell command whose output is passed on while it runs, and which other code can end."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Protocol, TextIO

from farandole.base.machine import wall_time_s

GRACEFUL_TERMINATION_TIME_S = 5
"""Seconds from SIGTERM to SIGKILL."""

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)")
_LOOK_S = 0.1


class _Readable(Protocol):
    def fileno(self) -> int: ...


def execute(
    command: str,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    index: int | None = None,
    events: Iterable[threading.Event] | None = None,
    prefix_output_with_timestamp: bool = False,
) -> int:
    """Run `command` in a shell, with this environment or with this process's own, and return its exit code; 128 + N
    when signal N ended it. Its output goes to the two streams, sys.stdout and sys.stderr unless given, line by line;
    `index`, when given, stands in front of each. The command and its children are ended as soon as one of `events` is
    set, or an exception is raised here."""
    process = subprocess.Popen(
        command,
        shell=True,
        env=None if env is None else dict(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    readers = [
        threading.Thread(
            target=prefix_connection, args=(pipe, to, name, index, prefix_output_with_timestamp), daemon=True
        )
        for pipe, to, name in (
            (process.stdout, stdout or sys.stdout, "stdout"),
            (process.stderr, stderr or sys.stderr, "stderr"),
        )
    ]
    for reader in readers:
        reader.start()
    try:
        _wait(process, tuple(events or ()))
    finally:
        _end(process)
        for reader in readers:
            reader.join(GRACEFUL_TERMINATION_TIME_S)
        process.stdout.close()
        process.stderr.close()
    code = process.returncode
    return 128 - code if code < 0 else code


def prefix_connection(
    src_connection: _Readable,
    dst_stream: TextIO,
    prefix: str | None,
    index: int | None,
    prefix_output_with_timestamp: bool,
) -> None:
    """Copy lines until the source ends, each as soon as it is complete, with `[index]<prefix>:` in front if both are
    given. A carriage return ends a line too: progress bars stay readable."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    front = "" if index is None or prefix is None else f"[{index}]<{prefix}>:"
    rest = ""

    def write(line: str) -> None:
        when = datetime.fromtimestamp(wall_time_s()).ctime() if front and prefix_output_with_timestamp else ""
        dst_stream.write(f"{when}{front}{line}")

    while data := os.read(src_connection.fileno(), 1 << 16):
        rest += decoder.decode(data)
        if lines := _LINE.findall(rest):
            for line in lines:
                write(line)
            dst_stream.flush()
            rest = rest[sum(map(len, lines)) :]
    if rest := rest + decoder.decode(b"", final=True):
        write(rest)
        dst_stream.flush()


def _wait(process: subprocess.Popen[bytes], events: tuple[threading.Event, ...]) -> None:
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_S if events else None)
            return
        if any(event.is_set() for event in events):
            return


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACEFUL_TERMINATION_TIME_S)
