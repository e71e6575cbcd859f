"""The folder of `--sample-ledger`, prepared before any worker starts. Used by arguments.py."""

from __future__ import annotations

import tempfile
from pathlib import Path

from farandole.errors import ConfigError


def ready_ledger_folder(folder: Path, may_hold_records: bool = False) -> Path:
    """Prepare the folder and return its absolute path. Raises ConfigError where it is not writable, and where it has
    records already, unless `may_hold_records` because this job continues their job."""
    try:
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        holds_records = any(folder.glob("*.jsonl"))
    except OSError as error:
        raise ConfigError(f"--sample-ledger {folder} cannot be written to: {error.strerror}") from None
    if holds_records and not may_hold_records:
        raise ConfigError(
            f"--sample-ledger {folder} holds the ledger of an earlier job: give each job a folder of its own"
        )
    return folder
