"""All checks of operations that are used wrongly, over the ranks of one job: see tests/checks."""

from __future__ import annotations

import farandole as fd
from tests.checks import mismatches, misuse
from tests.checks.running import checks_in, main

CHECKS = {
    name: check
    for name, check in {**checks_in(misuse, mismatches), **mismatches.disagreements()}.items()
    if name != "mismatches.check_disagreement"  # takes a line of the table
}

if __name__ == "__main__":
    main(CHECKS, limit_s=mismatches.LIMIT_S, init=lambda: fd.init(process_sets="dynamic"))
