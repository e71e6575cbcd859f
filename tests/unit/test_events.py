"""Every event can be logged as a line and as JSON."""

from __future__ import annotations

import dataclasses
import json
import string
import subprocess
import sys

import msgspec
import pytest

from farandole.base.events.event import Event
from farandole.base.events.generation_events import (
    ChangePlanned,
    GenerationStarted,
    LinksDistrusted,
    Recovered,
    RegroupBegan,
    TooFewWorkers,
    TransportChosen,
)
from farandole.base.events.host_events import (
    AgentJoined,
    AgentWasLost,
    CoresShared,
    HostUndrained,
    PodsNotWatched,
    PreemptionAnnounced,
    PreemptionUnwatched,
    PreemptionWatched,
)
from farandole.base.events.job_events import (
    ExitsAwaited,
    JobBecameStatic,
    JobEnds,
    JobNotAnnounced,
    JobRemarked,
    ScaleChanged,
    ScaleRefused,
    StopAsked,
    TrainingCutShort,
    TrainingFinished,
    WorkerMetOthers,
    WorkersNeverMet,
    WorkerTrainsAlone,
)
from farandole.base.events.kinds import KINDS
from farandole.base.events.worker_events import (
    AllWorkersRestart,
    CollectiveStalled,
    SlotsMissing,
    StallNoticed,
    StateHash,
    StatesDiverged,
    StragglerFound,
    StragglerRecovered,
    UserCodeFailed,
    WorkerEnded,
    WorkerFailed,
    WorkerLeaves,
    WorkerLost,
    WorkersHung,
    WorkerSpawned,
    WorkerStacks,
)
from farandole.base.wire.control import EventRecord

SAMPLES = [
    AgentJoined("a", "node1", 1),
    AgentWasLost("a", "silent", ()),
    WorkerSpawned("w4", 1, "node1", 1, 3),
    SlotsMissing(1, 2, 120.0),
    SlotsMissing(1, 3, None),
    WorkerLost("w1", 1, "exited with code 3", 1, ("Killed",)),
    WorkerEnded("w1", 1, "exited with code 0"),
    UserCodeFailed("w1", "ValueError: x", "Traceback\nValueError: x\n"),
    RegroupBegan(2, "w1 exited", ()),
    ChangePlanned(3, "w4 join"),
    GenerationStarted(2, ("w0", "w2"), False, 0.012),
    TransportChosen(2, "over TCP"),
    TooFewWorkers(2, 1, 2, 600.0),
    LinksDistrusted(2, ("w0-w1",), ("w1",)),
    LinksDistrusted(2, ("w0-w1",), ("w1",), is_proved=True),
    HostUndrained("node1"),
    JobNotAnnounced("no such folder"),
    WorkerLeaves("w1", 1),
    PreemptionWatched("aws"),
    PreemptionUnwatched("aws: 500", is_tried_again=True),
    PreemptionUnwatched("no known cloud", is_tried_again=False),
    PreemptionAnnounced("AWS: the spot instance will stop", must_leave=True),
    PodsNotWatched("the server answers 403"),
    ScaleChanged(3, 1),
    ScaleRefused(1, 2, None),
    TrainingFinished(2, ("w0",)),
    JobBecameStatic(2, ("w0", "w2"), "train.py:41: a second training loader"),
    TrainingCutShort(5, 3, 50, 30),
    TrainingCutShort(5, 1, 0, 0),
    JobRemarked("skipped steps", "3 of 24 steps were skipped"),
    Recovered(2, False, "x", (), (), (), 9.0, 3000.0, 2.0, 1.0, 1.0, 5.0, "w0", 2, 24),
    StallNoticed(7, ("w1",), ("w0",), 60.0),
    WorkersHung(7, ("w1",), 60.0),
    WorkerStacks("w1", "Thread 1\n  in f\n"),
    CollectiveStalled(7, ("w0", "w1"), 60.0),
    StateHash(12, 2, "24fd62"),
    StragglerFound("w1", 1, "node1", 31, 140),
    StragglerRecovered("w1", 1, "node1", 97, 260),
    StatesDiverged(7, "model.0.weight", 3, ("w1",), "w0", False),
    StatesDiverged(7, "ema.0", 1, ("w1", "w2"), "w0", True),
    StopAsked("SIGINT", 5.0),
    CoresShared(4, 2, 1),
    JobEnds(1, "No worker is left."),
    WorkerTrainsAlone("w0", 3),
    WorkerMetOthers("w0"),
    WorkersNeverMet(("w1",), ("w0", "w2")),
    ExitsAwaited(("w1",), 10.0),
    WorkerFailed("w1", "node1", 1, 0, 0, 4711, 1, "ValueError: bad", "Traceback ...", "/logs/error.json", 1),
    AllWorkersRestart(3, 2, 4, "w1 (slot 1) exited with code 1"),
]


def test_every_event_has_a_line_and_fields_for_json() -> None:
    for event in SAMPLES:
        assert event.line()
        assert event.level in ("info", "warning")
        assert json.loads(json.dumps(event.fields()))["event"] == type(event).__name__


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_sentence_has_fields_of_its_event(kind: type[Event]) -> None:
    fields = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if "line" not in vars(kind):
        assert {name for _, name, _, _ in string.Formatter().parse(kind.sentence) if name} <= fields


def test_a_line_says_one_slot_and_two_workers() -> None:
    assert SAMPLES[0].line() == "agent a on node1 joined with 1 slot"
    assert SAMPLES[10].line() == "generation 2 starts after 12 ms with 2 workers: w0, w2"


def test_training_that_was_cut_short_is_told_in_what_can_be_counted() -> None:
    assert TrainingCutShort(5, 3, 50, 30).line() == (
        "the script has ended the training itself: 30 of 50 steps were not applied; "
        "3 of 5 epochs ended early or were not started"
    )
    assert TrainingCutShort(1, 1, 0, 0).line().endswith("itself: 1 of 1 epoch ended early or were not started")
    assert TrainingCutShort(0, 0, 40, 30).line().endswith("itself: 30 of 40 steps were not applied")
    assert TrainingCutShort().line().endswith("itself: it has left the elastic function before this returned")


def test_of_a_stopped_worker_s_threads_the_main_thread_comes_first() -> None:
    stacks = 'Thread 0x1f (most recent call first):\n  File "queues.py", line 3 in get\n\n'
    stacks += 'Current thread 0x2e (most recent call first):\n  File "train.py", line 9 in step\n'
    assert WorkerStacks("w1", stacks).line().splitlines() == [
        "the threads of w1 when it was stopped:",
        "The main thread (most recent call first):",
        '  File "train.py", line 9 in step',
        "",
        "Thread 0x1f (most recent call first):",
        '  File "queues.py", line 3 in get',
    ]


def test_the_main_thread_is_the_last_one_that_faulthandler_writes() -> None:
    """What the order of the stacks in a WorkerStacks rests on."""
    script = (
        "import faulthandler, threading, sys\n"
        "release = threading.Event()\n"
        "threads = [threading.Thread(target=release.wait, daemon=True) for _ in range(3)]\n"
        "for thread in threads: thread.start()\n"
        "def of_the_main_thread(): faulthandler.dump_traceback(all_threads=True)\n"
        "of_the_main_thread()\n"
    )
    written = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60).stderr
    blocks = written.rstrip().split("\n\n")
    assert len(blocks) == 4
    assert "of_the_main_thread" in blocks[-1]


def test_every_event_reaches_a_subscriber_unchanged() -> None:
    for event in SAMPLES:
        record = EventRecord(1, 2, 0.5, event.level, event.line(), event.fields())
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=EventRecord) == record
