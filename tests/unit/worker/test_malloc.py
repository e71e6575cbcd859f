"""Memory that is freed in one step is kept for the next one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from farandole.base.env.inheritance import has_malloc_settings

# 20 tensors of 8 MB at a time, ten times over: each a bit smaller than what the C library would map by itself.
_FAULTS = """
import resource, sys
import torch
import farandole as fd
if sys.argv[1] == "init":
    fd.init()
def use():
    return [torch.ones(2 << 20) for _ in range(20)]
use(), use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


# 40 tensors of 2 MB, as a newcomer receives.
_JOIN = """
import resource, sys
import torch
import farandole as fd
from farandole.training.worker.process_setup import map_memory_ahead
fd.init()
if sys.argv[1] == "ahead":
    map_memory_ahead([torch.nn.Linear(1 << 9, 1 << 14)])
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
arrived = [torch.ones(1 << 19) for _ in range(40)]
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(first: str, script: str = _FAULTS, **settings: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", script, first],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **settings},
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="only the C library of Linux is told")
def test_init_saves_page_faults() -> None:
    assert faults("init") < 2000
    assert faults("no init") > 20_000


@pytest.mark.skipif(sys.platform != "linux", reason="only the C library of Linux is told")
def test_a_newcomer_has_its_memory_before_it_joins() -> None:
    assert faults("ahead", _JOIN) < 2000
    assert faults("late", _JOIN) > 10_000
    assert faults("ahead", _JOIN, MALLOC_TRIM_THRESHOLD_="131072") > 10_000


def test_what_the_user_has_set_counts() -> None:
    assert faults("init", MALLOC_TRIM_THRESHOLD_="131072") > 20_000


def test_settings_are_recognized() -> None:
    assert has_malloc_settings({"MALLOC_TOP_PAD_": "1"})
    assert has_malloc_settings({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"})
    assert not has_malloc_settings({"GLIBC_TUNABLES": "glibc.rtld.nns=2", "PATH": "/bin"})
