"""farandole.run() runs a function as the workers of a job, and returns its result on each of them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pickle
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar, Unpack

import cloudpickle  # type: ignore[import-untyped]
import msgspec

from farandole.base.config import JobConfig
from farandole.base.machine import now_s
from farandole.base.wire.function_call import LARGEST_BYTES, Call, FunctionJob, Return, ReturnPart
from farandole.errors import FatalError
from farandole.job.coordinator.transition import Outcome
from farandole.job.engines.host_list import SshSettings, chosen_hosts
from farandole.job.launch.call_options import FunctionOptions, by_name, job_of
from farandole.job.launch.job_runner import NO_ADDITIONS, Additions
from farandole.job.launch.job_spec import JobSpec
from farandole.job.launch.launcher import launch, reporting
from farandole.registry import factory

T = TypeVar("T")

_LOOK_S = 0.5  # Python passes a Ctrl-C on between two waits, at the latest

BY_POSITION = (
    "slots reset_limit cooldown_range hosts hostfile host_discovery_script start_timeout ssh_port ssh_identity_file "
    "disable_cache output_filename verbose use_gloo use_mpi mpi_args network_interface network_interfaces executable "
    "np min_np max_np"
)
"""The arguments of run() after max_num_proc, in Horovod's order."""


class RunOptions(FunctionOptions, total=False):
    """The further arguments of run()."""

    slots: int | None
    hosts: str | None
    hostfile: str | None
    host_discovery_script: str | None
    ssh_port: int | None
    ssh_identity_file: str | None
    disable_cache: bool | None
    use_gloo: bool | None
    use_mpi: bool | None
    mpi_args: str | None
    network_interface: str | None
    executable: str | None
    np: int | None
    min_np: int | None
    max_np: int | None


def run(
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    *others: Any,
    **options: Unpack[RunOptions],
) -> list[T]:
    """Call `func(*args, **kwargs)` in each of `num_proc` workers, and return their results, by rank.

    The function, its arguments and its results travel by cloudpickle; so functions of a notebook or of `__main__`,
    closures and lambdas work. A function of a module is imported by its name, so each host must have the module. The
    workers are new processes of this Python, or on other hosts of the Python of their agents. They run in the folder of
    this process, or in that of their agent where there is no such folder.

    The call, and the result of each worker, may take 1 GiB each. They travel over the job's authenticated connections,
    and only this process unpickles results.

    Args:
        func: The function for the workers.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        num_proc: The number of workers.
        min_num_proc: The fewest workers that may continue in an elastic function. Without it, all are needed.
        max_num_proc: The most workers that may ever train.
        others: Further arguments by position, in Horovod's order: slots, reset_limit, cooldown_range, hosts, hostfile,
            host_discovery_script, start_timeout, ssh_port, ssh_identity_file, disable_cache, output_filename, verbose,
            use_gloo, use_mpi, mpi_args, network_interface, network_interfaces, executable, np, min_np, max_np.
        options: The keyword arguments below.

    Keyword Args:
        hosts: For example "localhost:4,b:4". Agents on other machines are started by ssh.
        hostfile: A file with lines such as `b slots=4`.
        host_discovery_script: A command that prints the hosts; it is run repeatedly.
        slots: The slots of hosts that the script prints without a number.
        reset_limit: As --reset-limit.
        cooldown_range: The fewest and the most seconds, as --blacklist-cooldown-range.
        start_timeout: Seconds, as --start-timeout.
        elastic_timeout: Seconds, as --elastic-timeout.
        ssh_port: As --ssh-port.
        ssh_identity_file: As --ssh-identity-file.
        network_interfaces: The network interfaces that are used between hosts, as --network-interfaces.
        network_interface: The same, separated by commas.
        output_filename: As the flag of the same name.
        prefix_output_with_timestamp: As the flag of the same name.
        verbose: As the flag of the same name.
        executable: Another Python for the workers, and for agents on other machines.
        env: Variables of the workers in addition to those of this process.
        checkpoint: As --checkpoint DIR: the state of an elastic function is written there, and the next call resumes
            from it.
        checkpoint_every: As --checkpoint-every.
        checkpoint_keep: As --checkpoint-keep.
        tls: As --tls DIR: the folder of `farandole certificates`, at the same path on each machine.
        strict: As --strict: the same model, to the last bit, for any number of workers.
        shards: As --shards.
        progress: "auto" or "always": a line at the bottom of the terminal about the job, as --progress.
        np: Another name of num_proc.
        min_np: Another name of min_num_proc.
        max_np: Another name of max_num_proc.
        use_gloo: Accepted; requests the default behaviour.
        disable_cache: Horovod's, without effect and with a warning, like the following ones.
        use_mpi: Without effect.
        mpi_args: Without effect.

    Returns:
        The results of the workers that completed the function, by rank: `num_proc` of them, but of an elastic function
        as many as there were at its end.

    Raises:
        FunctionFailed: A worker raised; with the traceback of the first one. It is a RuntimeError.
        ConfigError: The arguments cannot work. It is a ValueError.
        TypeError: `func` is not a function, or cannot be sent.

    Examples:
        ```python
        def square(number):
            import farandole as fd

            fd.init()
            return number**2 + fd.rank()


        results = fd.run(square, args=(3,), num_proc=2)
        assert results == [9, 10]
        ```
    """
    given = by_name("run", RunOptions, options, others, BY_POSITION)
    if not callable(func):
        raise TypeError(f"farandole.run: the first argument must be the function for the workers, got {func!r}")
    for name in ("disable_cache", "use_mpi", "mpi_args"):
        if given.get(name):
            reason = factory("Horovod option without effect")(name)
            warnings.warn(f"farandole.run: {name} has no effect: {reason}", stacklevel=2)
    workers = num_proc if given.get("np") is None else given["np"]
    fewest = min_num_proc if given.get("min_np") is None else given["min_np"]
    most = max_num_proc if given.get("max_np") is None else given["max_np"]
    if given.get("network_interface") is not None:
        interfaces = [*(given.get("network_interfaces") or ()), *given["network_interface"].split(",")]
        given["network_interfaces"] = interfaces
    spec = job_of(
        given,
        JobConfig(workers, workers if fewest is None else fewest, most),
        hosts=chosen_hosts(*(given.get(each) for each in ("hosts", "hostfile", "host_discovery_script", "slots"))),
        executable=given.get("executable"),
        ssh=SshSettings(given.get("ssh_port"), given.get("ssh_identity_file") or "", given.get("executable") or ""),
    )
    return run_function(lambda: func(*args, **(kwargs or {})), spec)


def run_function(call: Callable[[], T], spec: JobSpec, additions: Additions = NO_ADDITIONS) -> list[T]:
    """Run a function as run() does, as the workers of this job, and return the results of all workers that completed
    it, by rank. `additions`: of the entry."""
    sent = encoded(call)
    with tempfile.TemporaryDirectory(prefix="farandole-run-") as name:  # only this user can look into it
        returns = Returns(Path(name))
        function = FunctionJob(sent, returns.add)
        outcome = run_and_wait(spec, dataclasses.replace(additions, function=function))
        if outcome.exit_code != 0:
            raise FunctionFailed(outcome.reason, returns.first_traceback())
        return [result_of(returns, rank, outcome) for rank in range(max(spec.config.min_np, returns.workers))]


def run_and_wait(spec: JobSpec, additions: Additions = NO_ADDITIONS) -> Outcome:
    """Run a job in ordinary code, and wait until it has ended. Raises what launch() raises. A KeyboardInterrupt ends
    the job first, with the workers' grace period."""
    with reporting(spec, is_quiet=False) as report:
        return launch(spec, report, dataclasses.replace(additions, run=in_thread))


# The function on its way to the workers, and what they return ---------------------------------------------------------


class FunctionFailed(FatalError):
    """The job of farandole.run() failed. `traceback` is that of the first worker that raised; empty when none did."""

    def __init__(self, reason: str, traceback: str = "") -> None:
        super().__init__(reason, traceback)
        self.reason, self.traceback = reason, traceback

    def __str__(self) -> str:
        return f"{self.reason}\n\nThe first worker that raised:\n{self.traceback}" if self.traceback else self.reason


def encoded(call: Callable[[], Any]) -> bytes:
    """Return the call as it travels. Raises TypeError when it cannot be sent."""
    try:
        pickled: bytes = cloudpickle.dumps(call)
    except Exception as error:
        raise TypeError(
            f"the function or its arguments cannot be sent to the workers: {error}; create objects that cannot be "
            "pickled (locks, open files, connections) inside the function"
        ) from error
    if len(pickled) > LARGEST_BYTES:
        raise TypeError(
            f"the function and its arguments take {len(pickled)} bytes when pickled, at most {LARGEST_BYTES} can be "
            "sent to the workers; load large data inside the function"
        )
    search_path = tuple(entry or str(Path.cwd()) for entry in sys.path)
    return msgspec.msgpack.encode(Call(search_path, pickled))


class Returns:
    """The returns of the workers, each in a file of its own in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Path] = {}  # by worker, also of those that are not complete
        self._results: dict[int, Path] = {}  # by rank; the last one counts
        self._errors: list[tuple[float, Path]] = []  # with the time of the exception, on this machine's clock
        self.workers = 0
        """The number of workers in the last generation, as far as one of them has left a result."""

    def add(self, part: ReturnPart) -> None:
        """Take the next part of a return."""
        path = self._files.setdefault(part.worker, self._folder / str(len(self._files)))
        with path.open("ab") as file:
            file.write(part.data)
        if part.is_last:
            returned = self._read(path)
            if returned.is_error:
                self._errors.append((now_s() - part.age_s, path))
            else:
                self._results[returned.rank] = path
                self.workers = max(self.workers, returned.size)

    def result(self, rank: int) -> bytes | None:
        """Return the pickled result of a rank; None: it has left none."""
        return self._read(self._results[rank]).data if rank in self._results else None

    def first_traceback(self) -> str:
        """Return the traceback of the worker that raised first: its exception most likely caused those of the
        others."""
        return self._read(min(self._errors)[1]).data.decode() if self._errors else ""

    def _read(self, path: Path) -> Return:
        return msgspec.msgpack.decode(path.read_bytes(), type=Return)


def result_of(returns: Returns, rank: int, outcome: Outcome) -> Any:
    """Return the result of a rank. Raises FunctionFailed when there is none, or it cannot be read."""
    pickled = returns.result(rank)
    if pickled is None:
        raise FunctionFailed(
            f"{outcome.reason} But rank {rank} left no result: it ended before its function returned, as by "
            "sys.exit(0)."
        )
    try:
        # Written by our own workers, and received from agents that have proved the token.
        return pickle.loads(pickled)
    except Exception as error:
        raise FunctionFailed(f"the result of rank {rank} cannot be unpickled: {error}") from error


# A job in ordinary code -----------------------------------------------------------------------------------------------


def in_thread(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of the coroutine, run on its own event loop in its own thread. An exception in this thread
    meanwhile, such as KeyboardInterrupt, cancels the coroutine, waits for it, and propagates. It also works
    where an event loop runs already: in a notebook, in a server."""
    runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)  # without a factory it sets the loop of this thread
    loop = runner.get_loop()
    task = loop.create_task(coroutine)
    ended: Future[T] = Future()

    def run() -> None:
        try:
            with runner:
                result = loop.run_until_complete(task)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            ended.set_exception(error)
        else:
            ended.set_result(result)

    threading.Thread(target=run, name="farandole-job", daemon=True).start()
    try:
        # Not the thread's join(): before Python 3.13 an interrupted join() marks the thread as ended from then on
        # (CPython 3.11, Lib/threading.py, Thread._wait_for_tstate_lock: the lock is also locked while it runs).
        while not wait([ended], _LOOK_S).done:
            pass
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the coroutine has just ended
            loop.call_soon_threadsafe(task.cancel)
        # Without a deadline: a cancelled job kills the remaining processes after its grace period.
        wait([ended])
        raise
    return ended.result()
