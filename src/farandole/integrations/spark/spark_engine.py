"""The engine of a Spark application: each slot of the job is a task of Spark that runs our agent as a child process.
spark_function.py starts a job on them.

Each task is a Spark job of its own, so that the end of one does not touch the others; in a barrier stage it would end
all (Spark 4.0, "Barrier Execution Mode"). Spark retries a task whose executor is taken away, and the agent joins again
from another one. After `spark.task.maxFailures` failures the fleet submits another task.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from farandole.job.engines.agent_process import exit_of_agent
from farandole.job.engines.engine_interface import AgentExit, AgentOrder

_END_S = 5.0


class SparkEngine:
    """Runs agents as tasks of `context`, a SparkContext. `environment` is that of the agents, in addition to that of
    the executor."""

    def __init__(self, context: Any, environment: Mapping[str, str]) -> None:
        self._context, self._environment = context, dict(environment)

    async def start(self, order: AgentOrder) -> SparkAgent:
        """Submit the task of one slot. It waits until Spark has a core for it."""
        return SparkAgent(
            self._context, _task(order.arguments(), order.standard_input(), self._environment), order.host
        )

    async def close(self) -> None:
        """Do nothing: the agents are closed already, and the Spark application belongs to the user."""


class SparkAgent:
    """An agent that is the child of a task, which has a job group of its own."""

    def __init__(self, context: Any, task: Callable[[Any], Any], host: str) -> None:
        self._context, self._task, self._host = context, task, host
        self._group = f"farandole-{host}-{secrets.token_hex(4)}"
        self._ended: Future[tuple[int, str]] = Future()
        threading.Thread(target=self._run, name=self._group, daemon=True).start()
        self._life = asyncio.wrap_future(self._ended)
        self._life.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may stay unread
        self._is_ending = False

    async def wait(self) -> AgentExit:
        """Wait until the agent, or its task, has ended."""
        try:
            code, last_lines = await asyncio.shield(self._life)
        except Exception as error:  # noqa: BLE001 - of Spark, or of the gateway to it
            reason = "" if self._is_ending else f"its task of Spark has ended: {_reason(error)}"
            return AgentExit(reason, are_workers_gone=False)
        return exit_of_agent(code, last_lines, "on its executor", "install it on all of them")

    def kill_workers(self) -> None:
        """End the task, and so the agent and its workers, at once."""
        if not self._is_ending and not self._life.done():
            self._is_ending = True
            threading.Thread(target=self._cancel, name=f"{self._group}-end", daemon=True).start()

    async def close(self) -> None:
        """End the task."""
        self.kill_workers()
        await asyncio.wait({self._life}, timeout=_END_S)
        self._life.cancel()

    def _run(self) -> None:
        """Run the Spark job. A job group belongs to the thread that submits jobs (pyspark, PYSPARK_PIN_THREAD)."""
        try:
            self._context.setJobGroup(self._group, f"Farandole: workers of {self._host}", interruptOnCancel=True)
            (result,) = self._context.parallelize([0], 1).mapPartitions(self._task).collect()
            outcome: Callable[[], None] = lambda: self._ended.set_result(result)  # noqa: E731
        except BaseException as error:  # noqa: BLE001 - raised in wait()
            failure = error
            outcome = lambda: self._ended.set_exception(failure)  # noqa: E731
        with contextlib.suppress(Exception):  # close() has not waited any longer
            outcome()

    def _cancel(self) -> None:
        with contextlib.suppress(Exception):  # the application has ended, and the task with it
            self._context.cancelJobGroup(self._group)


def _task(arguments: list[str], first_input: bytes, environment: dict[str, str]) -> Callable[[Any], Any]:
    """Return the function of a task. Spark pickles a function of a function by value: no module of this name is needed
    to report that Farandole is not installed on an executor."""

    def serve(_rows: Any) -> Any:
        """Run an agent, whose standard input ends with this process, and yield its exit code and last lines."""
        import collections
        import subprocess
        import sys

        from pyspark import TaskContext

        words = [f"{name}={value}" for name, value in environment.items()]
        context = TaskContext.get()
        if context is not None and "gpu" in context.resources():
            words.append("CUDA_VISIBLE_DEVICES=" + ",".join(context.resources()["gpu"].addresses))
        process = subprocess.Popen(
            ["env", *words, sys.executable, "-m", "farandole", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(first_input)
        lines: collections.deque[str] = collections.deque(maxlen=8)
        for line in process.stderr:
            lines.append(line.decode("utf-8", "backslashreplace").rstrip())
            sys.stderr.write(lines[-1] + "\n")
        yield process.wait(), "; ".join(lines)

    return serve


def _reason(error: BaseException) -> str:
    """Return the line of a long report of Spark that says most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith(("Caused by:", "org.apache.spark.SparkException:", ":"))]
    return (causes or lines or [type(error).__name__])[0].lstrip(": ")[:500]
