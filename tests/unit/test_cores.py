"""The cores that a process may use, from files as the kernel has them in containers, services and on bare machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from farandole.base.machine import affinity_cores, usable_cores

# What /proc/self/cgroup and mountinfo say, {} standing for where groups are mounted, and files of groups below that.
SECOND_IN_A_CONTAINER = ("0::/", "30 23 0:26 / {}/unified rw,nosuid - cgroup2 cgroup rw,nsdelegate")
SECOND_IN_A_SERVICE = (
    "0::/user.slice/user-1000.slice/job.service",
    "35 24 0:30 / {}/unified rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate",
)
FIRST_IN_A_SERVICE = (
    "9:name=systemd:/\n4:memory:/job\n2:cpu,cpuacct:/jobs/one\n0::/",
    "33 31 0:30 / {}/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
    "36 31 0:33 / {}/memory rw,relatime - cgroup cgroup rw,memory\n"
    "38 31 0:34 / {}/unified rw,relatime - cgroup2 cgroup2 rw",
)
FIRST_IN_A_CONTAINER = (
    "2:cpu,cpuacct:/docker/0123",
    "33 31 0:30 /docker/0123 {}/cpu,cpuacct ro,relatime master:7 - cgroup cgroup rw,cpu,cpuacct",
)
FIRST_BEHIND_A_NAMESPACE = (
    "2:cpu,cpuacct:/docker/0123",
    "33 31 0:30 /../.. {}/cpu,cpuacct ro,relatime - cgroup cgroup rw,cpu,cpuacct",
)
ONE_CORE = "100000 100000"


@pytest.mark.parametrize(
    ("told", "files"),
    [
        (SECOND_IN_A_CONTAINER, {"unified/cpu.max": ONE_CORE}),
        (SECOND_IN_A_CONTAINER, {"unified/cpu.max": "150000 100000"}),  # a core and a half
        (SECOND_IN_A_CONTAINER, {"unified/cpu.max": "20000 100000"}),  # less than one
        (SECOND_IN_A_SERVICE, {"unified/user.slice/cpu.max": ONE_CORE}),  # the limit of a group around it
        (
            SECOND_IN_A_SERVICE,
            {
                "unified/user.slice/cpu.max": "max 100000",
                "unified/user.slice/user-1000.slice/job.service/cpu.max": ONE_CORE,
            },
        ),
        (FIRST_IN_A_SERVICE, {"cpu,cpuacct/jobs/one/cpu.cfs_quota_us": "50000"}),
        (FIRST_IN_A_SERVICE, {"cpu,cpuacct/jobs/one/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_quota_us": "50000"}),
        (FIRST_IN_A_CONTAINER, {"cpu,cpuacct/cpu.cfs_quota_us": "50000"}),
        (FIRST_BEHIND_A_NAMESPACE, {"cpu,cpuacct/cpu.cfs_quota_us": "50000"}),
    ],
)
def test_a_quota_of_about_one_core_leaves_one(tmp_path: Path, told: tuple[str, str], files: dict[str, str]) -> None:
    assert usable_cores(proc(tmp_path, told, files)) == 1


@pytest.mark.parametrize(
    ("told", "files"),
    [
        (SECOND_IN_A_CONTAINER, {}),
        (SECOND_IN_A_CONTAINER, {"unified/cpu.max": "max 100000"}),
        (SECOND_IN_A_CONTAINER, {"unified/cpu.max": "409600000 100000"}),
        (SECOND_IN_A_SERVICE, {"unified/system.slice/cpu.max": ONE_CORE}),  # another group's
        (FIRST_IN_A_SERVICE, {"cpu,cpuacct/jobs/one/cpu.cfs_quota_us": "-1"}),
        (("", "nothing that a kernel would say"), {}),
    ],
)
def test_without_a_quota_the_affinity_counts(tmp_path: Path, told: tuple[str, str], files: dict[str, str]) -> None:
    assert usable_cores(proc(tmp_path, told, files)) == affinity_cores()


def test_without_proc_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "nothing") == affinity_cores()


def test_the_affinity_is_looked_at_each_time() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cores() == affinity_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert affinity_cores() == len(before)


def proc(folder: Path, told: tuple[str, str], files: dict[str, str]) -> Path:
    """A /proc/self with these files of control groups."""
    cgroup, mountinfo = told
    (folder / "cgroup").write_text(f"{cgroup}\n")
    (folder / "mountinfo").write_text(mountinfo.replace("{}", str(folder)) + "\n")
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
        if name.endswith("cpu.cfs_quota_us"):
            path.with_name("cpu.cfs_period_us").write_text("50000\n")
    return folder
