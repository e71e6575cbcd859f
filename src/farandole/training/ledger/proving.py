"""The proof of a sample ledger in a folder, under either rule: it reads the files, and chooses the check."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from farandole.errors import ConfigError
from farandole.training.ledger.check import Line, check
from farandole.training.ledger.commit_check import check_commits
from farandole.training.ledger.findings import Findings
from farandole.training.ledger.records import FORMAT, Entered, Opened, Started, decode


def prove(lines: Iterable[Line]) -> Findings:
    """Return the findings of check() or check_commits(), depending on `lines`, which are read up to three times."""
    first = next((line.record for line in lines if isinstance(line.record, Entered | Started)), None)
    return check_commits(lines) if isinstance(first, Entered) else check(lines)


# The reading of a ledger's records from its folder, one file at a time ------------------------------------------------


class Folder:
    """The records in a folder, read again by each iteration, so that they need no memory.

    Raises ConfigError where there is no ledger, or one of another format.
    """

    def __init__(self, path: Path) -> None:
        self._files = ledger_files(path)
        if not self._files:
            what = "has no ledger files (*.jsonl)" if path.is_dir() else "is not a folder"
            raise ConfigError(f"{path} {what}; give the folder of farandole run --sample-ledger")
        for file in self._files:
            try:
                with file.open("rb") as lines:
                    first = decode(lines.readline())
            except OSError as error:
                raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
            if isinstance(first, Opened) and first.format != FORMAT:
                raise ConfigError(f"{file} has format {first.format}; this version of Farandole reads format {FORMAT}")

    def __iter__(self) -> Iterator[Line]:
        for file in self._files:
            with file.open("rb") as lines:
                for number, text in enumerate(lines, start=1):
                    if text.strip():
                        is_whole = text.endswith(b"\n")
                        yield Line(file.name, number, decode(text) if is_whole else None, is_cut_short=not is_whole)


def ledger_files(path: Path) -> list[Path]:
    """Return the files in order: the parts of one worker are consecutive."""
    return sorted(path.glob("*.jsonl")) if path.is_dir() else []
