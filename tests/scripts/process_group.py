"""All checks of the backend "farandole" of torch.distributed, over the ranks of one job: see tests/checks."""

from __future__ import annotations

import warnings

import farandole as fd
from tests.checks import c10d_collectives, c10d_libraries, c10d_messages, c10d_misuse, c10d_subgroups, odd_tensors
from tests.checks.running import checks_in, main

CHECKS = checks_in(c10d_collectives, c10d_messages, c10d_subgroups, c10d_misuse, c10d_libraries, odd_tensors)


def init() -> None:
    warnings.filterwarnings("default", module="torch")  # what torch says of its own is its own business
    fd.init(default_group=True)


if __name__ == "__main__":
    main(CHECKS, limit_s=20.0, init=init)
