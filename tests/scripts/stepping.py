"""All checks of what leads to a step with a loader of ours, over the ranks of one job: see tests/checks."""

from __future__ import annotations

import farandole as fd
from tests.checks import layouts, set_gradients, stepping
from tests.checks.running import checks_in, main

CHECKS = checks_in(stepping, layouts, set_gradients)

if __name__ == "__main__":
    main(CHECKS, limit_s=20, init=fd.init)
