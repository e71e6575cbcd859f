"""The functions of the library that each test calls, so that a mutant runs with the tests of its function. Used by
run.py.

The calls of a test file are kept in a file until the test file changes.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "farandole"


@dataclass(frozen=True)
class TimedTest:
    """A test that passes without a mutant. `called` holds "path function" for each function that it calls; a lambda or
    a comprehension is a part of the function around it."""

    name: str
    seconds: float
    called: frozenset[str]


class CallRecorder:
    """A pytest plugin that records the calls of each test that passes. It sees every call of a Python function."""

    def __init__(self) -> None:
        self.tests: list[dict[str, Any]] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        codes: dict[int, CodeType] = {}  # by id: a hash of a code object takes long
        self._has_passed, began_s = True, time.monotonic()

        def trace(frame: FrameType, event: str, argument: object) -> None:
            codes[id(frame.f_code)] = frame.f_code

        threading.settrace(trace)
        sys.settrace(trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            if self._has_passed:
                seconds = time.monotonic() - began_s
                called = sorted({name for code in codes.values() if (name := _name_in_library(code))})
                self.tests.append({"name": item.nodeid, "seconds": seconds, "called": called})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._has_passed &= report.passed


def _name_in_library(code: CodeType) -> str:
    if not code.co_filename.startswith(f"{SOURCE}/"):
        return ""
    names = code.co_qualname.split(".")
    while names and names[-1].startswith("<"):  # <lambda>, <listcomp>, and the <locals> in front of it
        names.pop()
    return f"{Path(code.co_filename).relative_to(SOURCE)} {'.'.join(names)}"


def record_file(folder: Path, test_file: Path) -> Path:
    """Return the path of the record of a test file, which is another one when the test file has changed."""
    digest = hashlib.sha256(test_file.read_bytes()).hexdigest()[:16]
    return folder / f"{test_file.stem}-{digest}.json"


def read_record(path: Path) -> list[TimedTest]:
    tests = json.loads(path.read_text()) if path.exists() else []
    return [TimedTest(each["name"], each["seconds"], frozenset(each["called"])) for each in tests]
