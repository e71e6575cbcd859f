"""Ledgers of jobs with any schedule of deaths, joins, leaves and restarts: they check; a wrong number is named."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings, strategies as st

from farandole.training.ledger.check import check
from farandole.training.ledger.records import Intent, compact, expand
from tests.support.ledgers import WrittenJob

EVENTS = ("train", "train", "train", "die before", "die after, alone", "die behind", "change", "break", "restart")


@st.composite
def jobs(draw: st.DrawFn, at_least: int = 0) -> WrittenJob:
    """A job through which any of EVENTS have gone; its last step, if there is one, stands."""
    samples = draw(st.integers(1, 40))
    batch = draw(st.integers(1, samples))
    job = WrittenJob(samples, batch, [f"w{i}" for i in range(draw(st.integers(1, 4)))])
    saved = (0, 0, 0)
    for event in draw(st.lists(st.sampled_from(EVENTS), min_size=at_least, max_size=30)):
        if job.cursor == job.samples:
            job.end_epoch()
        if event in ("train", "break"):
            job.train()
        if event == "break" and job.cursor < job.samples:
            job.end_epoch()
        if event == "change":
            saved = (job.step, job.epoch, job.cursor)
        if event.startswith("die"):
            job.begin()
        if event == "die after, alone":
            job.apply_in_vain(job.members[:1])
        if event == "die behind":
            job.apply(by=job.members[:1])
        if event == "restart":
            job.run_id, job.generation = job.run_id + 1, 0
            job.step, job.epoch, job.cursor = saved
        if event.startswith("die") or event in ("change", "restart"):
            stay = job.members[1:] if event == "die after, alone" else job.members[:1]
            fresh = [f"w{len(job.files) + i}" for i in range(draw(st.integers(0, 2)))]
            job.regroup([*stay, *fresh] or [f"w{len(job.files)}"])
    if job.cursor == job.samples:
        job.end_epoch()
    job.train()
    return job


@settings(max_examples=300, deadline=None)
@given(jobs())
def test_every_such_ledger_is_exact(job: WrittenJob) -> None:
    findings = check(job.lines())
    assert findings.is_exact, findings
    assert findings.steps == job.step


@settings(max_examples=300, deadline=None)
@given(jobs(at_least=5), st.data())
def test_a_wrong_number_in_a_step_that_stands_is_caught_and_named(job: WrittenJob, data: st.DataObject) -> None:
    """In the last step, which nothing can have made void."""
    name = data.draw(st.sampled_from(job.members))
    records = job.files[name]
    place = max(place for place, record in enumerate(records) if isinstance(record, Intent))
    intent = records[place]
    assert isinstance(intent, Intent)
    ids = expand(intent.ids).tolist()
    if not ids:
        return  # a dummy batch
    wrong = data.draw(st.integers(0, job.samples).filter(lambda number: number != ids[0]))
    records[place] = msgspec.structs.replace(intent, ids=compact([wrong, *ids[1:]]))
    findings = check(job.lines())
    assert not findings.is_exact
    epoch = findings.epochs[-1]
    assert any(f"step {intent.step}:" in problem for problem in findings.problems)
    trained = [job.sample_at(position) for position in range(job.cursor)]
    if wrong == job.samples:
        assert epoch.foreign == [wrong]
    elif wrong in trained:
        assert epoch.repeated == [wrong]
    if job.cursor == job.samples:
        assert epoch.lost == [ids[0]]


@settings(max_examples=200, deadline=None)
@given(jobs(), st.data())
def test_without_the_files_of_one_worker_no_sample_is_taken_for_lost_or_repeated(
    job: WrittenJob, data: st.DataObject
) -> None:
    while len(job.members) < 2:
        job.regroup([*job.members, f"w{len(job.files)}"])
    if job.cursor == job.samples:
        job.end_epoch()
    job.train()
    del job.files[data.draw(st.sampled_from(sorted(job.files)))]
    findings = check(job.lines())
    for epoch in findings.epochs:
        assert epoch.repeated == []
        if not findings.problems and epoch.begin == 0 and epoch.end == job.samples:
            assert (epoch.lost, epoch.unproved) == ([], 0)
