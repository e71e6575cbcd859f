"""Plant one-line faults in the library and see which of them the unit and property tests notice: `make mutate`, or

    python -m tests.mutation.run --seed 1 --mutants 60 [--files 'worker/*.py' ...]
    python -m tests.mutation.run --files training/worker/link.py --lines 100-130         all mutants of these lines

No file is changed: a process for each mutant imports the changed module, and runs the tests that call the function of
the mutant, until one of them fails. The first run records which functions each test calls, which takes minutes; later
ones do this again for test files that have changed. `rm -r .mutation` forgets it all.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, ModuleType

import pytest

from tests.mutation.called import ROOT, SOURCE, CallRecorder, TimedTest, read_record, record_file
from tests.mutation.mutants import Mutant, find_mutants

CORE = (
    *("job/coordinator/*.py", "training/worker/*.py", "training/state/*.py"),
    *(
        "training/data/sample_order.py",
        "training/optim/step_reduction.py",
        "training/ledger/check.py",
    ),
)
RECORDS = ROOT / ".mutation"
_TESTS = ("tests/unit", "tests/property")
_POLL_S = 0.02
_RECORD_LIMIT_S = 600.0
_MEMORY_BYTES = 8 << 30  # a mutant may never stop to append to a list
_PRELOADED = ("numpy", "torch", "torch._dynamo", "msgspec", "cloudpickle", "yaml", "fsspec")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="decides which mutants are drawn")
    parser.add_argument("--mutants", type=int, default=60, help="how many are drawn")
    parser.add_argument("--files", nargs="+", default=CORE, metavar="PATTERN", help="below src/farandole")
    parser.add_argument("--lines", type=_lines, help="FIRST-LAST: all mutants of these lines, none drawn")
    options = parser.parse_args()
    for name in _PRELOADED:
        importlib.import_module(name)
    # Few examples are enough for most faults, and no failing example of a mutant is kept for later runs.
    os.environ |= {"MEMBERSHIP_SCHEDULES": "200", "DATA_SCHEDULES": "100"}
    tests = _recorded_tests()
    sources = {
        str(path.relative_to(SOURCE)): path.read_text() for pattern in options.files for path in SOURCE.glob(pattern)
    }
    mutants = [mutant for path in sorted(sources) for mutant in find_mutants(path, sources[path])]
    if options.lines:
        mutants = [mutant for mutant in mutants if mutant.line in options.lines]
    else:
        mutants = random.Random(options.seed).sample(mutants, min(options.mutants, len(mutants)))
    counts: Counter[str] = Counter()
    for mutant in mutants:
        verdict, detail = _try(mutant, sources[mutant.path], tests)
        counts[verdict] += 1
        print(f"{verdict:9}{mutant.path}:{mutant.line} {mutant.function}  {detail}", flush=True)
        if verdict == "survived":
            print(mutant.diff(sources[mutant.path]), flush=True)
    noticed = len(mutants) - counts["survived"]
    print(f"{noticed} of {len(mutants)} mutants noticed ({noticed / max(len(mutants), 1):.0%}): {dict(counts)}")
    return 0


def _lines(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def _recorded_tests() -> list[TimedTest]:
    """Return all unit and property tests that pass, with their calls."""
    RECORDS.mkdir(exist_ok=True)
    found = []
    for test_file in sorted(path for folder in _TESTS for path in (ROOT / folder).rglob("test_*.py")):
        record = record_file(RECORDS, test_file)
        if not record.exists():
            print(f"recording the calls of {test_file.relative_to(ROOT)}", flush=True)

            def run(test_file: Path = test_file, record: Path = record) -> int:
                recorder = CallRecorder()
                _run_tests([str(test_file)], recorder)
                record.write_text(json.dumps(recorder.tests))
                return 0

            if _in_a_process(run, _RECORD_LIMIT_S) != 0:
                print("  failed: its tests are left out")
        found += read_record(record)
    return found


def _try(mutant: Mutant, source: str, tests: Sequence[TimedTest]) -> tuple[str, str]:
    """Return "killed", "timeout" or "survived", and what is to be said of it."""
    concerned = [test for test in tests if _concerns(test, mutant)]
    if not concerned:
        return "survived", "no test calls it"
    concerned.sort(key=lambda test: test.seconds)
    limit_s = 20.0 + 3 * sum(test.seconds for test in concerned)
    failure = RECORDS / "failure"
    failure.unlink(missing_ok=True)

    def run() -> int:
        module = "farandole." + mutant.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        sys.meta_path.insert(0, _MutantFinder(module, SOURCE / mutant.path, mutant.apply(source)))
        return _run_tests([test.name for test in concerned], _FirstFailure(failure), "-x")

    began_s = time.monotonic()
    code = _in_a_process(run, limit_s)
    taken = f"{time.monotonic() - began_s:.1f} s"
    if code is None:
        return "timeout", f"after {taken}"
    if code == pytest.ExitCode.OK:
        return "survived", f"{len(concerned)} tests, {taken}"
    return "killed", f"by {failure.read_text() if failure.exists() else 'an import'}, {taken}"


def _concerns(test: TimedTest, mutant: Mutant) -> bool:
    if mutant.function:
        return f"{mutant.path} {mutant.function}" in test.called
    return any(name.startswith(f"{mutant.path} ") for name in test.called)


# In a process of its own ---------------------------------------------------------------------------------------------


def _in_a_process(function: Callable[[], int], limit_s: float) -> int | None:
    """Return its result from a forked process, None: it took too long. Whatever it has started is ended, too."""
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
        output = os.open(RECORDS / "output", os.O_RDWR | os.O_CREAT | os.O_TRUNC)  # of the last one, for a look at it
        for descriptor in (0, 1, 2):
            os.dup2(output, descriptor)
        code: int = pytest.ExitCode.INTERNAL_ERROR
        try:
            code = function()
        finally:
            os._exit(code)
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            _end_group(pid)
            return os.waitstatus_to_exitcode(status)
        time.sleep(_POLL_S)
    _end_group(pid)
    os.waitpid(pid, 0)
    return None


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _run_tests(names: list[str], plugin: object, *more: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = f"{folder}/hypothesis"
        os.chdir(ROOT)
        options = ["-q", "-p", "no:cacheprovider", f"--basetemp={folder}/tests", "--hypothesis-seed=0"]
        return pytest.main([*options, *more, *names], plugins=[plugin])


class _FirstFailure:
    """A pytest plugin that writes to a file which test has failed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._path.write_text(report.nodeid)


class _MutantFinder(importlib.abc.MetaPathFinder):
    """Imports one module from another text than that of its file."""

    def __init__(self, module: str, path: Path, source: str) -> None:
        self._module, self._path, self._source = module, path, source

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._module:
            return None
        loader = _MutantLoader(name, str(self._path), self._source)
        return importlib.util.spec_from_file_location(name, self._path, loader=loader)


class _MutantLoader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec", dont_inherit=True)


if __name__ == "__main__":
    sys.exit(main())
