"""Tracker: writes the numbers of a training by step, each once, whichever worker is rank 0. A value of a TorchState."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from itertools import islice
from typing import Any, Protocol, SupportsFloat, runtime_checkable

from farandole.training.collectives import world
from farandole.training.state import step as current_step
from farandole.training.state.metrics_file import MetricsFile

_IN_STATE = 4
"""The number of records that the state of a tracker has: more than those of the one step that a worker may lack."""

_KEPT = 10_000
"""The number of records that each worker keeps, for the case that a host is lost with what it had not stored yet."""


@runtime_checkable
class MetricsWriter(Protocol):
    """The interface of what a Tracker writes to. Only rank 0 opens it.

    Raises:
        OSError: From its methods, when something cannot be written. The training ends with it.

    Examples:
        ```python
        class Printer:
            def open(self, run):
                return {}

            def write(self, step, values):
                print(step, values, flush=True)

            def close(self):
                pass


        tracker = fd.elastic.Tracker(Printer())
        ```
    """

    def open(self, run: str) -> Mapping[str, int]:
        """Open it.

        Args:
            run: Identifies the training, also when it continues from a checkpoint.

        Returns:
            The newest step of each name that it has of this run.
        """
        ...

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step, so that they are kept when the process is killed afterwards. A writer that waits
        for more of them, to write them together, also has a method `flush()`, which writes what waits: it is called
        before a checkpoint and at the end of the training.

        Args:
            step: The number of the step.
            values: The values by name.
        """
        ...

    def close(self) -> None:
        """Close it. It may be opened again."""
        ...


class Tracker:
    """Writes numbers by step, each once and without a gap, to one file, whichever worker is lost.

    Every worker calls log() with the same steps and names. Rank 0 writes the values; the others keep them. When another
    worker becomes rank 0, it opens the same file, reads what it has, and adds what is missing. So the Tracker has to be
    a value of the TorchState, and the path one that all hosts see.

    The file is a CSV file with the columns run, step, name and value; `MetricsReader` reads it, also while it grows. It
    has a value 0.3 s after its log() at the latest, and before a checkpoint of the same step. A
    job that starts again without a checkpoint appends another run. After a restart from a checkpoint the steps that the
    file has already are not written again.

    Args:
        target: The path of the file, or an object with the methods of `MetricsWriter`.

    Raises:
        ConfigError: From log(): the file is not one of a Tracker.
        OSError: From log(): the file cannot be written.

    Examples:
        ```python
        state = fd.elastic.TorchState(model, optimizer, loader=loader, tracker=fd.elastic.Tracker("metrics.csv"))


        @fd.elastic.run
        def train(state):
            for epoch in loader.epochs(2):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(x), y)
                    loss.backward()
                    if optimizer.step():
                        state.tracker.log(state.step, loss=fd.mean(loss.item(), weight=len(x)))


        train(state)
        ```
    """

    def __init__(self, target: str | os.PathLike[str] | MetricsWriter) -> None:
        self._writer: MetricsWriter = MetricsFile(target) if isinstance(target, str | os.PathLike) else target
        self.run = secrets.token_hex(4)
        self._records: dict[int, dict[str, float]] = {}
        self._written: dict[str, int] | None = None  # newest step by name; None: this worker has not opened the target
        self._has_received = False  # records of another worker, which may have to be written

    def log(self, step: int, /, **values: float | SupportsFloat) -> None:
        """Write the values of a step. Every worker calls it; rank 0's values are written.

        Of several values with one name and step the first one counts. In a rehearsal nothing is written.

        Args:
            step: The number of the step, which grows: `state.step`.
            **values: Numbers, or tensors with one element, for which the call waits.

        Raises:
            TypeError: A value is neither a number nor a tensor with one element.
            OSError: Rank 0 cannot write the file.
        """
        numbers: dict[str, Any] = values
        for name, value in numbers.items():
            if type(value) is not float:
                numbers[name] = _number(name, value)
        if current_step.is_rehearsal():
            return
        record = self._records.get(step)
        if record is None:
            self._records[step] = record = numbers
            if len(self._records) > _KEPT:
                self._forget_oldest()
        else:
            for name, number in numbers.items():
                record.setdefault(name, number)
        if self._is_writer():
            if self._written is None or self._has_received:
                self._write_missing()
            else:
                self._write(step, record)

    def regrouped(self) -> None:
        """Adapt to another rank: a new rank 0 writes what the former one has not. The run loop calls it."""
        if self._is_writer():
            self._write_missing()
        else:
            self.close()

    def flush(self) -> None:
        """Let the target have all that was logged: needed only before you read the file while you train.

        Raises:
            OSError: Rank 0 cannot write the file.
        """
        flush = getattr(self._writer, "flush", None)
        if self._written is not None and flush is not None:
            flush()

    def close(self) -> None:
        """Close the target. The next log() opens it again."""
        if self._written is not None:
            self._written = None
            self._writer.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the newest records: a worker may lack those of a step that others have applied."""
        newest = list(islice(reversed(self._records.items()), _IN_STATE))
        return {"run": self.run, "records": {step: dict(values) for step, values in reversed(newest)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Add records to those that this worker has."""
        if self.run != state["run"]:  # another worker's is the job's; or that of a checkpoint
            self.run = state["run"]
            self.close()
        is_new = False
        for step, values in state["records"].items():
            is_new |= step not in self._records
            record = self._records.setdefault(step, {})
            for name, number in values.items():
                record.setdefault(name, number)
        if is_new:
            self._records = dict(sorted(self._records.items()))
            self._has_received = True
            self._forget_oldest()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_written": None}  # a copy opens the target by itself

    def _is_writer(self) -> bool:
        return world.current().placement.rank == 0

    def _forget_oldest(self) -> None:
        while len(self._records) > _KEPT:
            del self._records[next(iter(self._records))]

    def _write_missing(self) -> None:
        """Write all records that the target does not have."""
        if not self._records:
            return
        if self._written is None:
            self._written = dict(self._writer.open(self.run))
        for step, values in self._records.items():
            self._write(step, values)
        self._has_received = False

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values that are newer than those that were written."""
        assert self._written is not None
        due = {name: value for name, value in values.items() if step > self._written.get(name, -1)}
        if due:
            self._writer.write(step, due)
            self._written.update(dict.fromkeys(due, step))


def _number(name: str, value: Any) -> float:
    try:
        # A tensor's own method: torch's float() warns of a tensor that has its graph.
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"Tracker.log({name}=...): a number or a tensor with one element, got {type(value).__name__}"
        ) from None


def flush_trackers(state: object) -> None:
    """Let the targets of all trackers of a state have what was logged. Raises OSError when rank 0 cannot write one."""
    for value in vars(state).values():
        if isinstance(value, Tracker):
            value.flush()
