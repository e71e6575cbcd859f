"""What an agent can tell of its workers, from the messages that it has carried."""

from __future__ import annotations

from farandole.base.membership import DataAddress, GenerationId, Peer, Placement
from farandole.base.wire.link_messages import (
    Abort,
    Elastic,
    Failed,
    Finished,
    Hello,
    Leaving,
    Left,
    Newcomer,
    Prepare,
    Ready,
    Released,
    Start,
    Stop,
    Synced,
)
from farandole.base.wire.message import PROTOCOL_VERSION
from farandole.base.wire.messages import (
    AgentLeaving,
    ForwardToWorkers,
    FromWorker,
    Spawn,
    StartWorkers,
    ToldWorker,
    WorkerDying,
    WorkerExited,
    WorkersTold,
)
from farandole.job.agent.coordinator_session import SessionRecords

HERE = DataAddress("127.0.0.1", 7)
ID = GenerationId(1, 1, 4, "job-4")
START = Start(ID, Placement(1, 2, 0, 1, 0, 2), Peer("w0", 0, HERE), Peer("w0", 0, HERE), bootstrap=True)


def spawned(*workers: str) -> SessionRecords:
    records = SessionRecords()
    for slot, worker in enumerate(workers):
        records.note_received(Spawn(worker, slot, attempt=2))
    return records


def test_it_tells_the_place_of_a_worker_and_what_it_has_said() -> None:
    records = spawned("w1")
    for said in (Hello("w1", "", 9, PROTOCOL_VERSION, HERE), Elastic()):
        records.note_sent(FromWorker("w1", said))
    records.note_received(StartWorkers({"w1": START}))
    for said in (Synced(4), Ready(6), Finished(4), Leaving(), Failed("ValueError: x", "Traceback")):
        records.note_sent(FromWorker("w1", said))
    for order in (Prepare(5, "a change"), Abort(6, "a fault"), Released(4), Newcomer(2), Left()):
        records.note_received(ForwardToWorkers(("w1",), order))
    records.note_sent(WorkerDying("w1"))
    assert records.told("job") == WorkersTold(
        "job",
        (
            ToldWorker(
                "w1",
                0,
                address=HERE,
                pid=9,
                has_met=True,
                is_elastic=True,
                generation=ID,
                rank=1,
                size=2,
                announced=6,
                ready=6,
                synced=4,
                finished=4,
                released=4,
                is_leaving=True,
                has_left=True,
                raised="ValueError: x",
                is_newcomer=True,
                is_dying=True,
            ),
        ),
        number=6,
        attempt=2,
    )


def test_a_worker_that_has_exited_is_not_told_of_and_the_highest_number_stays() -> None:
    records = spawned("w0", "w1")
    records.note_received(ForwardToWorkers(("w0",), Abort(8, "a fault")))
    records.note_sent(WorkerExited("w0", -9))
    records.note_sent(FromWorker("w0", Ready(8)))
    assert records.told("job") == WorkersTold("job", (ToldWorker("w1", 1),), number=8, attempt=2)


def test_it_tells_that_the_agent_leaves_and_that_the_job_was_ending() -> None:
    records = spawned("w0")
    records.note_sent(AgentLeaving("SIGTERM was received"))
    records.note_received(ForwardToWorkers(("w0",), Stop("SIGINT was received")))
    told = records.told("job")
    assert (told.leaving, told.ending) == ("SIGTERM was received", "SIGINT was received")
