"""A state as it was at a boundary, copied while training continues. checkpoint_writer.py writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from farandole.checkpoint.json_values import to_json
from farandole.membership import Progress
from farandole.state.background_copy import BackgroundCopy
from farandole.state.deep_copy import tensors_in
from farandole.state.packing import Packed, unpack


class Kept(Protocol):
    """A state as a checkpoint sees it: a StepState, or the CommittedState of commit_sync.py. As in sync.py."""

    is_holder: bool

    @property
    def progress(self) -> Progress: ...
    def capture(self) -> None: ...
    def captured(self) -> Packed: ...
    def load_metadata(self, metadata: Mapping[str, Any]) -> None: ...
    def live_tensors(self) -> dict[str, Any]: ...
    def load_tensors(self, tensors: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Snapshot:
    """The data to be written. Its tensors are complete once the copies have ended: see Staging."""

    progress: Progress
    plain: Any
    tensors: Mapping[str, torch.Tensor]


def live(state: Kept, progress: Progress) -> Snapshot:
    """Return the captured metadata and the live tensors, not copied. Raises ConfigError for a state with values that a
    checkpoint cannot hold."""
    # The captured data were pickled in this process a moment ago.
    plain, tensors = to_json({"metadata": unpack(state.captured()), "tensors": state.live_tensors()})
    return Snapshot(progress, plain, tensors)


class Staging:
    """Memory for one snapshot at a time, reused by the next one: as much as the state has, on the CPU."""

    def __init__(self) -> None:
        self.copies = BackgroundCopy()
        self._targets: dict[str, torch.Tensor] = {}

    def take(self, state: Kept, progress: Progress) -> Snapshot:
        """Take a snapshot right after state.capture(). The tensors are copied from now on, and are complete before an
        optimizer steps or `copies.finish()` returns. Raises the errors of live()."""
        snapshot = live(state, progress)
        tensors = {id(tensor) for tensor in tensors_in(state.live_tensors())}
        targets, later = {}, []
        for name, source in snapshot.tensors.items():
            target = self._target(name, source)
            if id(source) in tensors and source.device.type == "cpu":
                later.append((source.detach(), target))
            else:
                target.copy_(source.detach())
            targets[name] = target
        self._targets = targets
        self.copies.begin(later)
        return Snapshot(progress, snapshot.plain, targets)

    def _target(self, name: str, source: torch.Tensor) -> torch.Tensor:
        kept = self._targets.get(name)
        if kept is not None and (kept.shape, kept.dtype) == (source.shape, source.dtype):
            return kept
        return torch.empty(source.shape, dtype=source.dtype)
