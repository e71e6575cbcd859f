"""A worker's files of a sample ledger. A line is one write(2), so that it survives a kill -9 right after it.

Nothing here stops the training. When a line cannot be written (a full disk), this is logged once, and the file is
marked as incomplete.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from farandole.ledger.records import FORMAT, HOLED, WHOLE, Entered, Missed, Opened, Record, Started, encode

PART_BYTES = 64 << 20  # a larger file is followed by another one

logger = logging.getLogger("farandole")


class LedgerWriter:
    """Writes to `folder`/WORKER-RANDOM-0000.jsonl, then to -0001 and so on.

    worker, host  for people who read the ledger
    write         os.write, or a substitute in a test
    """

    def __init__(
        self,
        folder: Path,
        worker: str,
        host: str,
        part_bytes: int = PART_BYTES,
        write: Callable[[int, bytes], int] = os.write,
    ) -> None:
        self._folder, self._worker, self._host = folder, worker, host
        self._stem = f"{worker}-{secrets.token_hex(4)}"
        self._part_bytes, self._system_write = part_bytes, write
        self._file: int | None = None
        self._bytes = self._part = 0
        self._is_torn = False  # the file may end in the middle of a line
        self._missed = 0
        self._started: Started | Entered | None = None
        self._has_warned = False

    def write(self, record: Record) -> None:
        """Write a record. Never raises errors of the file system."""
        try:
            if self._file is None or self._bytes >= self._part_bytes:
                self._next_part()
            if self._missed:
                self._put(Missed(self._missed))
                self._missed = 0
            self._put(record)
        except OSError as error:
            self._missed += 1
            self._give_warning(error)
        if isinstance(record, Started | Entered):
            self._started = record  # for the parts to come

    def close(self) -> None:
        """Close the file. Idempotent; a later write() begins a new part."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _next_part(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._stem}-{self._part:04d}.jsonl"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self.close()
        self._file, self._bytes, self._is_torn = file, 0, False
        try:
            status = HOLED if self._missed else WHOLE
            self._put(Opened(FORMAT, status, self._worker, self._host, os.getpid(), self._part))
            if self._started is not None:
                self._put(self._started)  # each part can be understood alone
        except OSError:
            self.close()  # begun anew with the next line
            raise
        self._part += 1

    def _put(self, record: Record) -> None:
        assert self._file is not None
        line = encode(record)
        if self._is_torn:
            line = b"\n" + line
        written = self._system_write(self._file, line)
        self._bytes += written
        self._is_torn = written < len(line)
        if self._is_torn:
            raise OSError(f"only {written} of {len(line)} bytes were written")

    def _give_warning(self, error: OSError) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # needs no new block, so a full disk does not matter
                os.pwrite(self._file, HOLED.encode(), len(f'["opened",{FORMAT},"'))
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the sample ledger in %s lacks records from now on: %s; training continues. Free space there",
                self._folder,
                error,
            )
