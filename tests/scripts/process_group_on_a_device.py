"""The checks of the backend "farandole" with tensors on a device: a CUDA device if DEVICE is `cuda`, else one in
Python. See tests/checks."""

from __future__ import annotations

import os

import torch

import farandole as fd
from tests.checks import c10d_devices, c10d_reference
from tests.checks.running import checks_in, main

CHECKS = checks_in(c10d_devices)


def init() -> None:
    if os.environ.get("DEVICE") == "cuda":
        c10d_reference.DEVICE = torch.device("cuda", 0)
    else:
        from tests.support.python_device import DEVICE

        c10d_reference.DEVICE = DEVICE
    fd.init(default_group=True)


if __name__ == "__main__":
    main(CHECKS, limit_s=20.0, init=init)
