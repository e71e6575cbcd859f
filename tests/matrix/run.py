"""Run the core tests with other versions of torch: `make matrix`, or

    python -m tests.matrix.run [2.9.1 ...]          the oldest supported version and the newest one by default

Each version gets an environment in .venv-torch/ with the packages of requirements-dev.txt, which is kept for the next
time. The core tests are those with the marker `core`.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import deque
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".venv-torch"
OLDEST = "2.6.0"  # as in pyproject.toml
NEWEST = "newest"

_TESTS = ("tests/unit", "tests/integration")
# Versions of torch pin or bound sympy differently, so each brings its own.
_NOT_PINNED = ("torch", "sympy")
_DOWNLOAD = re.compile(r"Downloading \S+ \((\d{2,}[\d.]* MB|[\d.]+ GB)\)")


@dataclass(frozen=True)
class Outcome:
    """Numbers of tests of one version, as pytest counts them."""

    passed: int
    skipped: int
    failed: int
    duration_s: float

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.skipped} skipped, {self.failed} failed in {self.duration_s:.0f} s"


class InstallError(Exception):
    """pip could not install a version; the message has the end of its output, and what to do."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=[OLDEST, NEWEST], help=f"such as 2.9.1, or {NEWEST}")
    results: dict[str, str] = {}
    is_good = True
    for wanted in parser.parse_args().versions:
        version = wanted
        try:
            version = newest_version() if wanted == NEWEST else wanted
            python = prepare_environment(version)
        except InstallError as error:
            results[version], is_good = f"not tested: {error}", False
            continue
        outcome = run_core_tests(version, python)
        results[version] = str(outcome) if outcome else "not tested: pytest could not run the tests, see above"
        is_good = is_good and outcome is not None and outcome.failed == 0
    print(f"\nCore tests, Python {platform.python_version()}:")
    for version, result in results.items():
        print(f"  torch {version:<10} {result}")
    return 0 if is_good else 1


# Environments ---------------------------------------------------------------------------------------------------------


def newest_version() -> str:
    """Return the newest version of torch that pip finds for this Python."""
    _say("Asking for the newest version of torch ...")
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run(
        [*pip, "--dry-run", "--ignore-installed", "--no-deps", "--report", "-", "torch"], capture_output=True, text=True
    )
    if done.returncode:
        raise InstallError(
            f"pip finds no torch:\n{done.stderr}\nName a version that is installed: make matrix TORCH=..."
        )
    (found,) = json.loads(done.stdout)["install"]
    return str(found["metadata"]["version"])


def pinned_packages(requirements: str) -> list[str]:
    """Return the lines of requirements-dev.txt that are installed beside any version of torch."""
    lines = [line.strip() for line in requirements.splitlines()]
    return [line for line in lines if line and line[0] != "#" and line.partition("==")[0] not in _NOT_PINNED]


def prepare_environment(version: str) -> Path:
    """Return the Python of the environment with this version of torch, which is created unless it is up to date."""
    folder = ENVIRONMENTS / version
    python, stamp, requirements = folder / "bin" / "python", folder / ".ready", folder / "requirements.txt"
    packages = "\n".join([f"torch=={version}", *pinned_packages((ROOT / "requirements-dev.txt").read_text())])
    wanted = f"{platform.python_version()}\n{packages}"
    if stamp.exists() and stamp.read_text() == wanted:
        _say(f"torch {version} is installed in {folder.relative_to(ROOT)}")
    else:
        _say(f"torch {version}: creating {folder.relative_to(ROOT)}; with CUDA it takes 6 GB and some minutes ...")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        requirements.write_text(packages)
        _install(python, "-r", str(requirements))
        # Written last: an environment whose creation was interrupted is created again.
        stamp.write_text(wanted)
    _install(python, "--no-deps", "--no-build-isolation", "-e", str(ROOT))  # takes seconds, and pyproject.toml changes
    return python


def _install(python: Path, *arguments: str) -> None:
    """Run pip, and print the large downloads. Raises InstallError."""
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", *arguments]
    last: deque[str] = deque(maxlen=15)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            last.append(line)
            if _DOWNLOAD.search(line):
                _say(f"  {line.strip()}")
            elif line.startswith("Installing collected packages") and "," in line:
                _say(f"  Installing {line.count(',') + 1} packages ...")
    if pip.returncode:
        raise InstallError(
            f"pip says\n{''.join(last)}\nIf this version has no wheel for Python {platform.python_version()}, choose "
            f"another Python: make clean; make matrix PYTHON=/path/to/python3"
        )


# Tests ----------------------------------------------------------------------------------------------------------------


def run_core_tests(version: str, python: Path) -> Outcome | None:
    """Run the core tests. Returns None if pytest could not run them."""
    _say(f"torch {version}: running the core tests, which takes two to three minutes ...")
    report = ENVIRONMENTS / version / "core-tests.xml"
    report.unlink(missing_ok=True)
    started_s = time.monotonic()
    options = ["-q", "-m", "core", f"--junit-xml={report}", *_TESTS]
    done = subprocess.run([str(python), "-m", "pytest", *options], cwd=ROOT)
    _say("")
    if done.returncode not in (0, 1) or not report.exists():
        return None
    return read_report(report.read_text(), time.monotonic() - started_s)


def read_report(report: str, duration_s: float) -> Outcome:
    """Count the tests in a report of pytest in JUnit's format. An error in a fixture counts as a failure."""
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for suite in ET.fromstring(report).iter("testsuite"):
        for name in counts:
            counts[name] += int(suite.get(name, 0))
    failed = counts["failures"] + counts["errors"]
    return Outcome(counts["tests"] - failed - counts["skipped"], counts["skipped"], failed, duration_s)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
