"""Certificates for tests. They need the package `cryptography`; without it the test is skipped."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest

from farandole.base.wire.encryption import Certificates
from farandole.job.launch.certificates_command import make_certificates


def made(folder: Path, days: int = 10) -> str:
    """Make a folder of certificates, and return its path."""
    pytest.importorskip("cryptography")
    make_certificates(folder, days)
    return str(folder)


@functools.cache
def of_this_process(name: str = "job") -> Certificates:
    """Certificates of one job for each name, for all tests of this process."""
    with tempfile.TemporaryDirectory() as folder:
        return Certificates(made(Path(folder) / name))
