"""farandole.run() runs a function as the workers of a job, and returns its result on each of them."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO, TypeVar

import cloudpickle  # type: ignore[import-untyped]
import msgspec

from farandole.base.config import JobConfig
from farandole.base.env import (
    CheckpointEnv,
    JobEnv,
    environment_of,
    inherited_environment,
    read_start_timeout_s,
    read_transport,
    strict_environment,
)
from farandole.base.events import Event
from farandole.base.machine import now_s
from farandole.base.wire.function_call import LARGEST_BYTES, Call, FunctionJob, Return
from farandole.base.wire.messages import ReturnPart
from farandole.errors import ConfigError, FatalError
from farandole.job.coordinator.server import Outcome
from farandole.job.engines.discovery import HostDiscovery, ScriptDiscovery
from farandole.job.engines.engine_interface import Engine
from farandole.job.engines.host_list import HostSlots, SshSettings, parse_hostfile, parse_hosts
from farandole.job.engines.ssh_engine import SshEngine
from farandole.job.launch.arguments import checkpoint_settings
from farandole.job.launch.checkpoint_place import Beginning, beginning
from farandole.job.launch.job_runner import EngineEvents, JobSetup, run_job
from farandole.job.launch.joining import check_encryption, tls_folder
from farandole.job.launch.output import OutputOptions, OutputSink, output_options
from farandole.job.launch.report import Loudness, Report
from farandole.job.launch.run_parser import PROGRESS
from farandole.job.launch.terminal_line import job_line
from farandole.registry import factory

T = TypeVar("T")
Streams = tuple[TextIO | None, TextIO | None]
Hosts = tuple[HostSlots, ...] | HostDiscovery | None

_TASK = "farandole.training.worker.function_task"


class FunctionFailed(FatalError):
    """The job of farandole.run() failed. `traceback` is that of the first worker that raised; empty when none did."""

    def __init__(self, reason: str, traceback: str = "") -> None:
        super().__init__(reason, traceback)
        self.reason, self.traceback = reason, traceback

    def __str__(self) -> str:
        return f"{self.reason}\n\nThe first worker that raised:\n{self.traceback}" if self.traceback else self.reason


def run(
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[float, float] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Iterable[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    elastic_timeout: float | None = None,
    prefix_output_with_timestamp: bool = False,
    env: Mapping[str, str] | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: str = "10m",
    checkpoint_keep: int = 2,
    tls: str | Path | None = None,
    strict: bool = False,
    shards: int | None = None,
    progress: str = "never",
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
    if network_interface is not None:
        network_interfaces = [*(network_interfaces or ()), *network_interface.split(",")]
    if not callable(func):
        raise TypeError(f"farandole.run: the first argument must be the function for the workers, got {func!r}")
    num_proc = num_proc if np is None else np
    min_num_proc = min_num_proc if min_np is None else min_np
    config = JobConfig(
        num_proc=num_proc,
        min_np=num_proc if min_num_proc is None else min_num_proc,
        max_np=max_num_proc if max_np is None else max_np,
        reset_limit=reset_limit,
        on_failure="host" if cooldown_range else "slot",
        cooldown_range_s=cooldown_range,
        start_timeout_s=read_start_timeout_s(JobConfig.start_timeout_s) if start_timeout is None else start_timeout,
        elastic_timeout_s=JobConfig.elastic_timeout_s if elastic_timeout is None else elastic_timeout,
        tls=encryption_of_call(tls),
    )
    for name, value in (("disable_cache", disable_cache), ("use_mpi", use_mpi), ("mpi_args", mpi_args)):
        if value:
            reason = factory("Horovod option without effect")(name)
            warnings.warn(f"farandole.run: {name} has no effect: {reason}", stacklevel=2)
    return run_function(
        lambda: func(*args, **(kwargs or {})),
        config,
        hosts=chosen_hosts(hosts, hostfile, host_discovery_script, slots),
        output=output_options(config, output_filename, prefix_output_with_timestamp),
        is_verbose=bool(verbose),
        environment=strict_variables(strict, shards, config, env),
        executable=executable,
        progress=progress,
        checkpoint=checkpoint_settings(checkpoint, checkpoint_every, checkpoint_keep),
        start=start_by_ssh(SshSettings(ssh_port, ssh_identity_file or "", executable or ""), network_interfaces or ()),
    )


def encryption_of_call(tls: str | Path | None) -> str:
    """Return the value of JobConfig.tls for the argument `tls` of run() and its likes. Raises ConfigError when the
    transport that the environment chooses cannot be encrypted."""
    folder = tls_folder(None if tls is None else Path(tls))
    check_encryption(folder, read_transport())
    return folder


def strict_variables(
    strict: bool, shards: int | None, config: JobConfig, environment: Mapping[str, str] | None
) -> Mapping[str, str]:
    """Return the variables of the workers, with those of strict mode. `strict` and `shards`: as in run().

    Raises:
        ConfigError: There are fewer shards than workers.
    """
    given = dict(environment or {})
    if not strict and shards is None:
        return given
    most = config.max_np or config.num_proc
    if shards is not None and shards < most:
        raise ConfigError(f"shards={shards} is below the largest number of workers, {most}: some would have none")
    job = environment_of(JobEnv(strict=True, shards=shards or most))
    return {**job, **strict_environment({**inherited_environment(), **given}), **given}


@dataclass(frozen=True)
class StartSettings:
    """The way in which workers are started on hosts that are other machines.

    make_engine  returns the engine; called with the listener to the job's events
    interfaces   the network interfaces that are used between hosts; empty: those that lead to the other hosts
    host         the address of the coordinator; empty: as in run_job()
    """

    make_engine: Callable[[Callable[[Event], None]], Engine]
    interfaces: tuple[str, ...] = ()
    host: str = ""


def start_by_ssh(settings: SshSettings | None = None, interfaces: Iterable[str] = ()) -> StartSettings:
    """Return the settings for hosts that are reached by ssh."""
    return StartSettings(partial(SshEngine, settings or SshSettings()), tuple(interfaces))


def run_function(
    call: Callable[[], T],
    config: JobConfig,
    *,
    hosts: Hosts = None,
    output: OutputOptions | None = None,
    is_verbose: bool = False,
    environment: Mapping[str, str] | None = None,
    executable: str | None = None,
    checkpoint: CheckpointEnv | None = None,
    start: StartSettings | None = None,
    streams: Streams = (None, None),
    progress: str = "never",
) -> list[T]:
    """Run a function as run() does, for a job with this `config`, and return the results of all workers that completed
    it, by rank."""
    if progress not in PROGRESS:
        raise ConfigError(f"progress must be one of {', '.join(map(repr, PROGRESS))}, got {progress!r}")
    sent = _encoded(call)
    with tempfile.TemporaryDirectory(prefix="farandole-run-") as name:  # only this user can look into it
        returns = _Returns(Path(name))
        outcome = run_and_wait(
            config,
            [executable or "", "-m", _TASK],
            hosts=hosts,
            output=output,
            is_verbose=is_verbose,
            environment=environment,
            checkpoint=checkpoint,
            start=start,
            streams=streams,
            progress=progress,
            function=FunctionJob(sent, returns.add),
        )
        if outcome.exit_code != 0:
            raise FunctionFailed(outcome.reason, returns.first_traceback())
        return [_result(returns, rank, outcome) for rank in range(max(config.min_np, returns.workers))]


def chosen_hosts(
    hosts: str | None, hostfile: str | None, script: str | None, slots: int | None, period_s: float | None = None
) -> Hosts:
    """Return the hosts of the workers; the script is run again `period_s` seconds after each answer. Raises ConfigError
    when more than one source is named, or the one cannot be read."""
    named = {"hosts": hosts, "hostfile": hostfile, "host_discovery_script": script}
    given = [name for name, value in named.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"only one of {' and '.join(given)} can determine where the workers run")
    if hosts is not None:
        return parse_hosts(hosts, slots or 1)
    if hostfile is not None:
        return parse_hostfile(hostfile)
    return None if script is None else ScriptDiscovery(script, slots or 1, period_s=period_s)


def _encoded(call: Callable[[], Any]) -> bytes:
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


class _Returns:
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


def _result(returns: _Returns, rank: int, outcome: Outcome) -> Any:
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


# A job run by ordinary code, also where an event loop runs already: in a notebook, in a server ------------------------


_LOOK_S = 0.5  # Python passes a Ctrl-C on between two waits, at the latest


def run_and_wait(
    config: JobConfig,
    command: Sequence[str],
    *,
    hosts: tuple[HostSlots, ...] | HostDiscovery | None = None,
    output: OutputOptions | None = None,
    is_verbose: bool = False,
    environment: Mapping[str, str] | None = None,
    checkpoint: CheckpointEnv | None = None,
    start: StartSettings | None = None,
    function: FunctionJob | None = None,
    streams: Streams = (None, None),
    progress: str = "never",
) -> Outcome:
    """Run `command` as the workers of a job, or a `function`, and wait until it has ended. Agents of other machines are
    started as `start` says; by ssh, without one. The workers' output goes to `streams`, which
    are sys.stdout and sys.stderr unless given; the launcher's own, only when `is_verbose` or when it is a warning.
    `progress` is one of PROGRESS in run_parser.py.

    Raises what run_job and, with a `checkpoint`, beginning() raise. A KeyboardInterrupt ends the job first, with the
    workers' grace period.
    """
    started = start_by_ssh() if start is None else start
    loudness = Loudness.VERBOSE if is_verbose else Loudness.QUIET
    report = Report(sys.stderr, loudness, line=job_line(progress, is_quiet=False))

    def job(begun: Beginning) -> Coroutine[Any, Any, Outcome]:
        def on_event(event: Event) -> None:
            report.on_event(event)
            begun.watch(event)

        engine_events = EngineEvents(on_event)
        return run_job(
            JobSetup(
                config=config,
                command=command,
                hosts=hosts,
                engine=started.make_engine(engine_events),
                engine_events=engine_events,
                interfaces=started.interfaces,
                host=started.host,
                function=function,
                output=output or OutputOptions(),
                sink=OutputSink(output or OutputOptions(), *streams, line=report.line) if any(streams) else None,
                line=report.line,
                on_summary=report.on_summary,
                on_event=on_event,
                extra_environment={**(environment or {}), **begun.environment},
                origin=begun.origin,
            )
        )

    try:
        with beginning(checkpoint) as begun:
            for note in begun.notes:
                report.note(note)
            return in_thread(job(begun))
    finally:
        report.close()


def in_thread(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of the coroutine, run on its own event loop in its own thread. An exception in this thread
    meanwhile, such as KeyboardInterrupt, cancels the coroutine, waits for it, and propagates."""
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
