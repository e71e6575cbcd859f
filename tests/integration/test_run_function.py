"""farandole.run(): functions of all sorts as the workers of a job, what they return and raise, and what is left behind.

Functions that do not import farandole cost no import of torch; most of these do not.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import farandole as fd
from farandole.errors import ConfigError
from farandole.job.launch.run_function import BY_POSITION, FunctionFailed
from tests.support.certificates import made
from tests.support.jobs import processes_with


@pytest.fixture(autouse=True)
def leftovers(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files of the test, its workers and their children: empty at the end, and nobody there."""
    folder = tmp_path_factory.mktemp("leftovers")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    assert list(folder.iterdir()) == []
    assert processes_with(str(folder)) == []


def rank() -> int:
    return int(os.environ["HOROVOD_RANK"])


def script(folder: Path, text: str, *words: str, stdin: bool = False) -> subprocess.CompletedProcess[str]:
    """Run `text` as a program: a file, or as a notebook has it, without one."""
    path = folder / "program.py"
    path.write_text(text)
    command = [sys.executable, *([] if stdin else [str(path)]), *words]
    return subprocess.run(command, input=text if stdin else None, capture_output=True, text=True, timeout=60)


# Results --------------------------------------------------------------------------------------------------


def test_connections_are_encrypted_if_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path / "certificates")
    assert fd.run(lambda: os.environ["FARANDOLE_TLS"], num_proc=2, tls=folder) == [folder] * 2
    with pytest.raises(ConfigError, match="the folder cannot be read"):
        fd.run(rank, tls=tmp_path / "missing")
    monkeypatch.setenv("FARANDOLE_TRANSPORT", "nccl")
    with pytest.raises(ConfigError, match="cannot be encrypted"):
        fd.run(rank, tls=folder)


def test_results_come_in_the_order_of_the_ranks() -> None:
    def place() -> tuple[int, str]:
        return int(os.environ["HOROVOD_RANK"]), os.environ["HOROVOD_SIZE"]

    assert fd.run(place, num_proc=3) == [(0, "3"), (1, "3"), (2, "3")]


def test_arguments_by_position_and_by_name() -> None:
    def call(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    assert fd.run(call, (1, [2]), {"three": {"four"}}, 2) == [((1, [2]), {"three": {"four"}})] * 2
    assert fd.run(call, [1]) == [((1,), {})]
    assert fd.run(call, np=2) == [((), {})] * 2


def test_the_order_of_arguments_is_horovods() -> None:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, each in inspect.signature(fd.run).parameters.items() if each.kind in kinds]
    assert " ".join([*names, BY_POSITION]) == (
        "func args kwargs num_proc min_num_proc max_num_proc slots reset_limit cooldown_range hosts hostfile "
        "host_discovery_script start_timeout ssh_port ssh_identity_file disable_cache output_filename verbose use_gloo "
        "use_mpi mpi_args network_interface network_interfaces executable np min_np max_np"
    )


def test_arguments_that_a_call_cannot_have_are_errors_as_of_any_function() -> None:
    with pytest.raises(ConfigError, match="reset"):
        fd.run(rank, (), None, 1, None, None, None, -1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_workers'"):
        fd.run(rank, max_workers=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="multiple values for argument 'slots'"):
        fd.run(rank, (), None, 1, None, None, 2, slots=2)
    with pytest.raises(TypeError, match="1 positional arguments too many"):
        fd.run(rank, (), None, 1, None, None, *[None] * 22)


def test_closures_lambdas_and_classes_of_a_function() -> None:
    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

        def shifted(self) -> Point:
            return Point(self.x + offset)

    offset = 10
    results = fd.run(lambda point: point.shifted(), args=(Point(1),), num_proc=2)
    assert [each.x for each in results] == [11, 11]
    assert fd.run(Point(5).shifted)[0].x == 15


def test_large_arguments_and_results() -> None:
    data = os.urandom(5_000_000)
    assert fd.run(lambda sent: sent[::-1], (data,), num_proc=2) == [data[::-1]] * 2


MAIN = """
import collections
import farandole as fd

Pair = collections.namedtuple("Pair", "rank factor")
FACTOR = 3

class Thing:
    def __init__(self, pair):
        self.pair = pair

def scaled(n):
    import os
    return Thing(Pair(int(os.environ["HOROVOD_RANK"]) * n, FACTOR))

def main():
    results = fd.run(scaled, args=(10,), num_proc=2)
    assert all(type(each) is Thing for each in results), results
    print("RESULT", [tuple(each.pair) for each in results])

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("stdin", [False, True])
def test_functions_and_classes_of_main(tmp_path: Path, stdin: bool) -> None:
    done = script(tmp_path, MAIN, stdin=stdin)
    assert done.returncode == 0, done.stderr
    assert "RESULT [(0, 3), (10, 3)]" in done.stdout


def test_modules_beside_the_script_are_found(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("def triple(x):\n    return 3 * x\n")
    done = script(tmp_path, "import beside, farandole\nprint('RESULT', farandole.run(beside.triple, (5,), num_proc=2))")
    assert done.returncode == 0, done.stderr
    assert "RESULT [15, 15]" in done.stdout


def test_functions_work_together_and_what_they_print_is_in_files(tmp_path: Path) -> None:
    def total() -> tuple[int, float, bool]:
        import torch

        import farandole

        farandole.init()
        value = farandole.allreduce(torch.tensor(float(farandole.rank() + 1)), op=farandole.Sum).item()
        said = farandole.rank(), value, farandole.is_initialized()
        sys.stdout.write(f"rank {farandole.rank()} has {value}\n")
        if farandole.rank() == 0:  # some clean up, some do not
            farandole.shutdown()
        return said

    results = fd.run(total, num_proc=2, output_filename=str(tmp_path / "logs"))
    assert results == [(0, 3.0, True), (1, 3.0, True)]
    for rank in range(2):
        assert (tmp_path / "logs" / f"rank.{rank}" / "stdout").read_text() == f"rank {rank} has 3.0\n"


def test_an_elastic_function_returns_the_results_of_the_workers_that_completed_it(tmp_path: Path) -> None:
    """One worker is killed on the way; it depends on the time whether its replacement joins. The results have the ranks
    at the end, also of workers that have called shutdown()."""

    def train(folder: str) -> tuple[int, int, bool]:
        import os
        import pathlib
        import signal

        import torch

        import farandole

        farandole.init()
        model = torch.nn.Linear(2, 1)
        state = farandole.elastic.TorchState(model=model, batch=0)

        @farandole.elastic.run
        def go_on(state: Any) -> int:
            while state.batch < 20:
                if state.batch == 7 and farandole.rank() == 1:
                    marker = pathlib.Path(folder) / "killed"
                    if not marker.exists():
                        marker.touch()
                        os.kill(os.getpid(), signal.SIGKILL)
                farandole.allreduce(torch.ones(1), name="step")
                state.batch += 1
                state.commit()
            return state.batch

        batches, rank = go_on(state), farandole.rank()
        farandole.shutdown()
        return batches, rank, (pathlib.Path(folder) / "killed").exists()

    results = fd.run(train, (str(tmp_path),), num_proc=3, min_num_proc=1, max_num_proc=3)
    assert len(results) in (2, 3)
    assert results == [(20, rank, True) for rank in range(len(results))]


# Errors ---------------------------------------------------------------------------------------------------


def test_an_exception_comes_back_with_the_workers_traceback() -> None:
    def inner(number: int) -> None:
        raise LookupError(f"no number {number} today")

    def outer() -> None:
        inner(int(os.environ["HOROVOD_RANK"]) + 41)

    with pytest.raises(RuntimeError, match="The first worker that raised") as caught:
        fd.run(outer, num_proc=2)
    assert isinstance(caught.value, FunctionFailed)
    trace = caught.value.traceback
    assert re.search(r"LookupError: no number 4[12] today\s*$", trace)
    assert trace.index("in outer") < trace.index("in inner")
    assert "function_task" not in trace, "what is ours is of no use to the reader"
    assert str(caught.value).count("LookupError: no number") <= 2  # in the reason, and in the traceback


def test_one_worker_that_raises_ends_the_others() -> None:
    def wait_for_ever() -> None:
        import threading

        if int(os.environ["HOROVOD_RANK"]) == 1:
            raise KeyError("on rank 1")
        threading.Event().wait()

    with pytest.raises(FunctionFailed, match="on rank 1"):
        fd.run(wait_for_ever, num_proc=3)


def test_exceptions_that_cannot_be_pickled_or_printed_well() -> None:
    def odd() -> None:
        class Odd(Exception):
            def __init__(self, one: int, two: int) -> None:
                super().__init__()
                self.lock = threading.Lock()

            def __str__(self) -> str:
                return "größer \udcff \0"

        raise Odd(1, 2)

    with pytest.raises(FunctionFailed, match="größer"):
        fd.run(odd)


@pytest.mark.parametrize("code", [3, "bye"])
def test_exit_codes_are_said(code: Any) -> None:
    with pytest.raises(FunctionFailed, match=f"code {3 if code == 3 else 1}"):
        fd.run(sys.exit, (code,))


def test_a_worker_that_leaves_early_has_no_result() -> None:
    with pytest.raises(FunctionFailed, match="rank 0 left no result"):
        fd.run(sys.exit, (0,))


def test_a_killed_worker_is_named() -> None:
    with pytest.raises(FunctionFailed, match="SIGKILL"):
        fd.run(lambda: os.kill(os.getpid(), signal.SIGKILL), num_proc=2)


def test_results_that_cannot_be_sent_back() -> None:
    def lock() -> Any:
        import threading

        return threading.Lock()

    with pytest.raises(FunctionFailed, match="returned a lock that cannot be pickled"):
        fd.run(lock)


def test_a_result_above_the_limit_is_an_error_of_the_worker() -> None:
    def large() -> bytes:
        sys.modules["__main__"].LARGEST_BYTES = 1000  # type: ignore[attr-defined]
        return bytes(1001)

    with pytest.raises(FunctionFailed, match=r"returned a bytes of 10.. bytes when pickled, at most 1000"):
        fd.run(large)


def test_a_call_above_the_limit_is_refused_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farandole.job.launch.run_function.LARGEST_BYTES", 1000)
    with pytest.raises(TypeError, match="at most 1000 can be sent to the workers; load large data inside"):
        fd.run(len, (bytes(1001),))


def test_results_that_cannot_be_read_here() -> None:
    def sly() -> Any:
        class Sly:
            def __reduce__(self) -> Any:
                return int, ("no number",)

        return Sly()

    with pytest.raises(FunctionFailed, match="cannot be unpickled"):
        fd.run(sly)


def test_functions_that_cannot_be_sent() -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match="inside the function"):
        fd.run(lambda: lock.locked())
    with pytest.raises(TypeError, match="inside the function"):
        fd.run(print, (lock,))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_proc": 0}, "at least 1"),
        ({"num_proc": 2, "min_num_proc": 3}, "above"),
        ({"num_proc": 3, "max_num_proc": 2}, "above"),
        ({"num_proc": 2, "min_np": 0}, "at least 1"),
        ({"hosts": "localhost:1", "hostfile": "hosts"}, "only one of hosts and hostfile"),
        ({"hosts": "localhost:x"}, "localhost:x"),
        ({"hosts": "no-such-machine.example:2", "num_proc": 2}, "no-such-machine"),
        ({"hostfile": "/no/such/file"}, "/no/such/file"),
        ({"cooldown_range": (5, 1)}, "cooldown"),
        ({"reset_limit": -1}, "reset"),
        ({"start_timeout": -1}, "start-timeout"),
        ({"output_filename": "/proc/no/folder"}, "/proc/no/folder"),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_anything_starts(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fd.run(lambda: None, **arguments)


def test_what_is_no_function() -> None:
    with pytest.raises(TypeError, match="first argument must be the function"):
        fd.run(3)  # type: ignore[arg-type]


# Around it ------------------------------------------------------------------------------------------------


def test_options_of_other_launchers_are_warned_of_and_change_nothing() -> None:
    asked = {"use_mpi": True, "mpi_args": "-x", "disable_cache": True}
    with pytest.warns(UserWarning, match="has no effect") as said:
        assert fd.run(rank, **asked) == [0]  # type: ignore[arg-type]
    assert {str(each.message).split()[1] for each in said} == asked.keys()
    assert {each.filename for each in said} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fd.run(rank, use_gloo=True, disable_cache=False, verbose=False) == [0]


def test_what_workers_print_is_shown_with_their_names(capfd: pytest.CaptureFixture[str]) -> None:
    def speak() -> None:
        rank = os.environ["HOROVOD_RANK"]
        sys.stdout.write(f"out of {rank}\n")
        sys.stderr.write(f"err of {rank}\n")

    fd.run(speak, num_proc=2)
    out, err = capfd.readouterr()
    assert "[w0] out of 0" in out
    assert "[w1] out of 1" in out
    assert "[w0] err of 0" in err
    assert "[farandole]" not in out + err, "it is quiet unless asked"
    fd.run(speak, num_proc=2, verbose=True)
    out, err = capfd.readouterr()
    assert "[farandole]" in out + err


def test_workers_have_the_environment_and_what_is_added() -> None:
    os.environ["OF_THE_PARENT"] = "here"
    try:
        said = fd.run(lambda: (os.environ["OF_THE_PARENT"], os.environ["ADDED"]), env={"ADDED": "too"})
    finally:
        del os.environ["OF_THE_PARENT"]
    assert said == [("here", "too")]
    assert "ADDED" not in os.environ


def test_another_python(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nSTARTED_BY=other exec {sys.executable} "$@"\n')
    other.chmod(0o755)
    assert fd.run(lambda: os.environ["STARTED_BY"], num_proc=2, executable=str(other)) == ["other"] * 2


def test_hosts_in_three_ways(tmp_path: Path) -> None:
    def place() -> tuple[str, str]:
        return os.environ["HOROVOD_HOSTNAME"], os.environ["HOROVOD_LOCAL_SIZE"]

    assert fd.run(place, num_proc=2, hosts="localhost:2") == [("localhost", "2")] * 2
    file = tmp_path / "hosts"
    file.write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    assert fd.run(place, num_proc=2, hostfile=str(file)) == [("localhost", "1"), ("127.0.0.1", "1")]
    discovery = tmp_path / "discover"
    discovery.write_text("#!/bin/sh\necho localhost\n")
    discovery.chmod(0o755)
    said = fd.run(place, num_proc=2, host_discovery_script=str(discovery), slots=2)
    assert said == [("localhost", "2")] * 2


def test_a_wrong_word_for_the_progress_line_is_refused() -> None:
    with pytest.raises(ConfigError, match="progress must be one of 'auto', 'never', 'always', got 'yes'"):
        fd.run(rank, progress="yes")


def test_inside_an_event_loop_and_in_a_thread() -> None:
    async def notebook() -> list[int]:
        return fd.run(rank, num_proc=2)

    assert asyncio.run(notebook()) == [0, 1]
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.append(fd.run(rank, num_proc=2)))
    thread.start()
    thread.join(30)
    assert found == [[0, 1]]


def test_two_jobs_at_the_same_time() -> None:
    found: dict[int, list[tuple[int, int]]] = {}

    def one(k: int) -> None:
        found[k] = fd.run(lambda: (k, int(os.environ["HOROVOD_RANK"])), num_proc=2)

    threads = [threading.Thread(target=one, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {k: [(k, 0), (k, 1)] for k in range(2)}


INTERRUPTED = """
import os, pathlib, signal, sys, threading
from farandole.base.config import JobConfig
from farandole.job.launch.call_options import function_job
from farandole.job.launch.run_function import run_function

folder = pathlib.Path(sys.argv[1])

def wait():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / str(os.getpid())).touch()
    threading.Event().wait()

try:
    run_function(wait, function_job(JobConfig(num_proc=2, min_np=2, grace_s=0.5)))
except KeyboardInterrupt:
    print("LEFT", [each.name for each in folder.iterdir() if pathlib.Path("/proc", each.name).exists()])
"""


def test_ctrl_c_ends_the_job_before_the_program_goes_on(tmp_path: Path) -> None:
    """Also workers that do not care for a SIGTERM."""
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while len(list(tmp_path.iterdir())) < 2 and process.poll() is None:
            threading.Event().wait(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert "LEFT []" in out
    assert err == ""  # nobody takes the end for a fault
    assert process.returncode == 0
