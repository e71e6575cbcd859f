"""The proof of a sample ledger, under either rule. The command line calls it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from farandole.ledger.check import Line, check
from farandole.ledger.commit_check import check_commits
from farandole.ledger.findings import Findings
from farandole.ledger.records import Entered, Started


def prove(lines: Iterable[Line]) -> Findings:
    """Return the findings of check() or check_commits(), depending on `lines`, which are read up to three times."""
    first = next((line.record for line in lines if isinstance(line.record, Entered | Started)), None)
    return check_commits(lines) if isinstance(first, Entered) else check(lines)
