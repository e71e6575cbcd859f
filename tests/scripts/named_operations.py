"""All checks of Horovod's operations, over the ranks of one job: see tests/checks."""

from __future__ import annotations

import farandole as fd
from tests.checks import gradients, groups, joining, lifetimes, moving, naming, reducing, sets, values
from tests.checks.running import checks_in, main

CHECKS = checks_in(reducing, moving, groups, naming, joining, gradients, sets, values, lifetimes)

if __name__ == "__main__":
    main(CHECKS, limit_s=20.0, init=lambda: fd.init(process_sets="dynamic"))
