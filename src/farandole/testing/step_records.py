"""Records of each worker's training, written by the worker itself: one line before and one after each step."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import farandole as fd
from farandole.training.state import step


class Records:
    """A file of records for each worker process. Each line is one write(2), so it survives a kill -9 right after it.

    {"before": step, "epoch", "generation", "ids", ...}   about to compute these samples
    {"after": step, ...}                                  the optimizer step is applied
    {"end": step, "parameters": hash, ...}                the elastic function has returned

    Every line has the process and its host, rank and size, and the monotonic clock of the machine in nanoseconds: "ns"
    now, and "since" when this object was made, since process ids are reused after a while.
    """

    def __init__(self, folder: str | None) -> None:
        self._file: int | None = None
        self._since = time.monotonic_ns()
        if folder is not None:
            path = Path(folder) / f"worker-{os.getpid()}-{socket.gethostname()}.jsonl"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def before_step(self, state: fd.elastic.TorchState, ids: Sequence[int] | None = None) -> None:
        """Record the begin of a step. `ids`: the samples as they are in the tensors, where the data set reports them;
        else as reported by the loader. None are recorded for a batch without effect: a rehearsal's."""
        if self._file is not None:
            ids = state.loader.indices if ids is None else ids
            ids = [] if step.is_rehearsal() else ids
            self._write({"before": state.step, "epoch": state.loader.epoch, "ids": ids})

    def after_step(self, state: fd.elastic.TorchState, is_counted: bool = True) -> None:
        """Record an applied step. `is_counted`: state.step has moved on; it has not yet when after_step calls this."""
        if self._file is not None:
            self._write({"after": state.step - is_counted})

    def at_end(self, state: fd.elastic.TorchState, **more: object) -> None:
        if self._file is not None:
            digest = hashlib.sha256()
            for parameter in state.model.parameters():
                digest.update(parameter.detach().cpu().numpy().tobytes())
            self._write({"end": state.step, "parameters": digest.hexdigest(), **more})

    def _write(self, record: dict[str, Any]) -> None:
        assert self._file is not None
        record |= {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "rank": fd.rank(),
            "size": fd.size(),
            "generation": fd.generation(),
            "ns": time.monotonic_ns(),
            "since": self._since,
        }
        os.write(self._file, json.dumps(record).encode() + b"\n")
