"""Every event can be logged as a line and as JSON."""

from __future__ import annotations

import json

from farandole import events

SAMPLES = [
    events.AgentJoined("a", "node1", 1),
    events.AgentWasLost("a", "silent", ()),
    events.WorkerSpawned("w4", 1, "node1", 1, 3),
    events.SlotsMissing(1, 2, 120.0),
    events.SlotsMissing(1, 3, None),
    events.WorkerLost("w1", 1, "exited with code 3", 1, ("Killed",)),
    events.WorkerEnded("w1", 1, "exited with code 0"),
    events.UserCodeFailed("w1", "ValueError: x", "Traceback\nValueError: x\n"),
    events.RegroupBegan(2, "w1 exited", ()),
    events.ChangePlanned(3, "w4 join"),
    events.GenerationStarted(2, ("w0", "w2"), False, 0.012),
    events.TransportChosen(2, "over TCP"),
    events.TooFewWorkers(2, 1, 2, 600.0),
    events.LinksDistrusted(2, ("w0-w1",), ("w1",)),
    events.LinksDistrusted(2, ("w0-w1",), ("w1",), is_proved=True),
    events.HostUndrained("node1"),
    events.JobNotAnnounced("no such folder"),
    events.WorkerLeaves("w1", 1),
    events.ScaleChanged(3, 1),
    events.ScaleRefused(1, 2, None),
    events.TrainingFinished(2, ("w0",)),
    events.Recovered(2, False, "x", (), (), (), 9.0, 3000.0, 2.0, 1.0, 1.0, 5.0, "w0", 2, 24),
    events.StallNoticed(7, ("w1",), ("w0",), 60.0),
    events.WorkersHung(7, ("w1",), 60.0),
    events.WorkerStacks("w1", "Thread 1\n  in f\n"),
    events.CollectiveStalled(7, ("w0", "w1"), 60.0),
    events.StopAsked("SIGINT", 5.0),
    events.JobEnds(1, "No worker is left."),
]


def test_every_event_has_a_line_and_fields_for_json() -> None:
    for event in SAMPLES:
        assert event.line()
        assert event.level in ("info", "warning")
        assert json.loads(json.dumps(event.fields()))["event"] == type(event).__name__


def test_a_line_says_one_slot_and_two_workers() -> None:
    assert SAMPLES[0].line() == "agent a on node1 joined with 1 slot"
    assert SAMPLES[10].line() == "generation 2 starts after 12 ms with 2 workers: w0, w2"
