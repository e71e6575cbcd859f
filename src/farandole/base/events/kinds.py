"""All kinds of events, by name: of one file after the other, in the order of the page of events."""

from __future__ import annotations

from farandole.base.events import generation_events, host_events, job_events, worker_events
from farandole.base.events.event import Event

MODULES = host_events, job_events, generation_events, worker_events

KINDS: dict[str, type[Event]] = {
    name: kind
    for module in MODULES
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
}
