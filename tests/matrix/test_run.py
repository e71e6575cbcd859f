"""The packages that are installed beside a version of torch, and the numbers that pytest reports."""

from __future__ import annotations

import tomllib

from tests.matrix.run import OLDEST, ROOT, Outcome, pinned_packages, read_report


def test_all_pinned_packages_are_installed_but_torch_and_what_it_pins_itself() -> None:
    requirements = "# The environment\nattrs==26.1.0\n\nsympy==1.14.0\ntorch==2.13.0\ntorchdata==0.11.0\n"
    assert pinned_packages(requirements) == ["attrs==26.1.0", "torchdata==0.11.0"]


def test_the_oldest_version_is_the_one_that_the_package_claims() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={OLDEST.removesuffix('.0')}" in project["dependencies"]


def test_errors_in_fixtures_count_as_failures() -> None:
    report = '<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="3" tests="10" /></testsuites>'
    assert read_report(report, 5.0) == Outcome(passed=4, skipped=3, failed=3, duration_s=5.0)
