"""Listeners of host events: the states of the running elastic functions. The link's thread calls them."""

from __future__ import annotations

import threading
from typing import Protocol

from farandole.base.machine import wall_time_s
from farandole.base.wire.link_messages import Prepare
from farandole.training.state.session import HostUpdateResult
from farandole.training.worker.worker_job import WorkerJob


class Listener(Protocol):
    def on_hosts_updated(self, timestamp: float, update_res: int) -> None: ...


class NotificationManager:
    """Passes host events on, under Horovod's names."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []

    def init(self, *_args: object, **_kwargs: object) -> None:
        """Do nothing: events come through the worker's link. For scripts that call it."""

    def register_listener(self, listener: Listener) -> None:
        with self._lock:
            self._listeners.append(listener)

    def remove_listener(self, listener: Listener) -> None:
        with self._lock:
            self._listeners = [each for each in self._listeners if each is not listener]

    def handle_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Pass an event on. `timestamp` in seconds since 1970, `update_res` as in HostUpdateResult. From any thread."""
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = NotificationManager()
"""Passes host events of the job to the states, under Horovod's name. See the example of `init`."""


class PlannedUpdates:
    """The content of the last PREPARE; a context manager for the time of one elastic function."""

    def __init__(self, job: WorkerJob | None, state: Listener) -> None:
        self._job = job
        self._state = state
        self._newest: Prepare | None = None

    def update(self, number: int) -> int:
        """Return the update of the PREPARE for generation `number`, in Horovod's numbers; 0 when it is not the
        newest."""
        newest = self._newest
        return newest.update if newest is not None and newest.number == number else 0

    def repeat(self) -> None:
        """Repeat a message that came for a generation beyond the current one, since the state has forgotten its
        messages."""
        newest = self._newest
        if newest is not None and self._job is not None and self._job.link.prepared == newest.number:
            self._state.on_hosts_updated(wall_time_s(), HostUpdateResult(newest.update))

    def __enter__(self) -> PlannedUpdates:
        notification_manager.register_listener(self._state)
        if self._job is not None:
            self._job.link.on_prepare = self._on_prepare
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._job is not None:
            self._job.link.on_prepare = None
        notification_manager.remove_listener(self._state)

    def _on_prepare(self, prepare: Prepare) -> None:
        """Pass a PREPARE on. Runs on the link's thread."""
        self._newest = prepare
        notification_manager.handle_hosts_updated(wall_time_s(), HostUpdateResult(prepare.update))
