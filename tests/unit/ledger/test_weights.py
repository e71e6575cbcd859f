"""What a ledger proves of the weights of each worker."""

from __future__ import annotations

import msgspec

from farandole.training.ledger.check import check
from farandole.training.ledger.findings import Findings
from farandole.training.ledger.records import Applied, Differed, Record, Started
from tests.support.ledgers import WrittenJob


def findings_of(job: WrittenJob) -> Findings:
    return check(job.lines())


def places(job: WrittenJob, name: str, step: int) -> list[int]:
    return [place for place, r in enumerate(job.files[name]) if isinstance(r, Applied) and r.step == step]


def change(job: WrittenJob, name: str, step: int, **values: int) -> None:
    for place in places(job, name, step):
        job.files[name][place] = msgspec.structs.replace(job.files[name][place], **values)


def start_without_copies(job: WrittenJob) -> None:
    for records in job.files.values():
        records[:] = [
            msgspec.structs.replace(record, copied=False) if isinstance(record, Started) else record
            for record in records
        ]


def test_a_step_that_moved_the_weights_twice_is_found() -> None:
    job = WrittenJob()
    job.train(4)
    for name in job.files:
        change(job, name, 2, updates=2 if name == "b" else 1)
    assert findings_of(job).problems == ["step 2 was applied 2 times to the weights of b"]


def test_a_step_that_did_not_move_the_weights_is_found() -> None:
    job = WrittenJob()
    job.train(4)
    change(job, "c", 1, updates=0)
    assert findings_of(job).problems == ["c counted step 1, but its weights did not change"]


def test_a_step_that_one_worker_skipped_is_found() -> None:
    job = WrittenJob()
    job.train(4)
    (place,) = places(job, "b", 2)
    del job.files["b"][place]
    assert findings_of(job).problems == ["b applied step 3 without step 2"]


def test_a_step_that_one_worker_wrote_twice_is_found() -> None:
    job = WrittenJob()
    job.train(4)
    (place,) = places(job, "b", 2)
    job.files["b"].insert(place, job.files["b"][place])
    assert findings_of(job).problems == ["b applied step 2 again"]


def test_a_survivor_that_lacks_a_step_and_copied_nothing_is_found() -> None:
    job = WrittenJob()
    job.train(1)
    job.begin()
    job.apply(by=["a"])
    job.regroup(["a", "c"])
    job.train(2)
    assert findings_of(job).is_exact, "c may have copied the state of a"
    start_without_copies(job)
    assert findings_of(job).problems == [
        "c had applied steps up to 0, and began generation 2 at step 2 without a copy of another worker's state"
    ]


def hashed(job: WrittenJob, digests: dict[str, list[int]]) -> None:
    for name, values in digests.items():
        for step, value in enumerate(values):
            change(job, name, step, digest=value, updates=1)


def test_a_worker_with_other_weights_is_found_from_the_digests_alone() -> None:
    job = WrittenJob()
    job.train(4)
    hashed(job, {"a": [5, 0, 6, 7], "b": [5, 0, 8, 9], "c": [5, 0, 6, 7]})
    assert findings_of(job).problems == [
        "the state of b differed from that of the others before step 2, and still before step 3"
    ]


def test_what_the_workers_have_found_themselves_is_said_with_its_name_once() -> None:
    job = WrittenJob()
    job.train(4)
    hashed(job, {"a": [5, 0, 6, 7], "b": [5, 0, 8, 7], "c": [5, 0, 6, 7]})
    found = Differed(1, 1, 3, 0, "model.0.weight", 2, (1,), 0, is_trained=True)
    for name in job.files:
        job.files[name].append(found)
    assert findings_of(job).problems == [
        "the workers found before step 3 that model.0.weight and 1 more tensor of b differed from a's"
    ]
    records: list[Record] = job.files["a"]
    for name in job.files:
        records = job.files[name]
        records[-1] = msgspec.structs.replace(found, name="model.queue", objects=1, is_trained=False)
    findings = findings_of(job)
    assert findings.is_exact, "a buffer may be computed from each worker's own samples"
    assert findings.remarks == ["the workers found before step 3 that model.queue of b differed from a's"]
