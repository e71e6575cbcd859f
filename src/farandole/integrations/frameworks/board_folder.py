"""One folder of TensorBoard for a whole job, in which each point is once: used by both adaptations of frameworks."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farandole.training.state.tracker import Tracker


class Board(ABC):
    """A framework's logger for TensorBoard, as a MetricsWriter.

    place   determines its folder; the same on all workers
    folder  the path of the folder
    """

    place: Any

    @property
    @abstractmethod
    def folder(self) -> str: ...

    @abstractmethod
    def name_files(self, suffix: str) -> None:
        """Let the names of the files that it opens from now on end like this."""

    def open(self, run: str) -> dict[str, int]:
        return newest_steps(self.folder, run)

    @abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add points, and flush them to the file."""

    @abstractmethod
    def close(self) -> None:
        """Close its file. The next write() opens one."""


class BoardTracker(Tracker):
    """A Tracker whose target is the folder of a framework's logger. Its state also has the place of the folder: that of
    the first rank 0, since frameworks derive it from the time and from the folders that exist.

    The files of a job are known by the ends of their names, in case that the folder has those of an earlier job.
    """

    def __init__(self, board: Board) -> None:
        super().__init__(board)
        self._board = board
        board.name_files(_suffix(self.run))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "place": self._board.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (state["run"], state["place"]) != (self.run, self._board.place):
            self._board.close()
            self._board.place = state["place"]
            self._board.name_files(_suffix(state["run"]))
        super().load_state_dict(state)


def _suffix(run: str) -> str:
    return f".{run}"


def can_read() -> bool:
    """Return whether folders can be read: tensorboardX alone can only write."""
    return importlib.util.find_spec("tensorboard") is not None


def files_of(folder: str, run: str) -> list[Path]:
    """Return the files of a run in a folder, the oldest first."""
    return sorted(Path(folder).glob(f"events.out.tfevents.*{_suffix(run)}"))


def newest_steps(folder: str, run: str) -> dict[str, int]:
    """Return the newest step of each name that a run has in a folder. A record that a killed process has left
    incomplete does not count."""
    files = files_of(folder, run)
    if not files:
        return {}
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader  # half a second

    newest: dict[str, int] = {}
    for file in files:
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                newest[value.tag] = max(event.step, newest.get(value.tag, event.step))
    return newest
