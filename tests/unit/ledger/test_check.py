"""What a ledger proves, from lines that a job without workers has written."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from farandole.errors import ConfigError
from farandole.training.ledger.check import Line, check
from farandole.training.ledger.findings import Findings, as_json, format_findings
from farandole.training.ledger.records import HOLED, Intent, Listed, Missed, Opened, Record, Started, compact, expand
from tests.support.ledgers import TWO_STREAMS, WrittenJob

STEPS = 4  # of one epoch


def findings_of(job: WrittenJob) -> Findings:
    return check(job.lines())


def change(job: WrittenJob, name: str, step: int, ids: list[int]) -> None:
    """Tamper with what a worker says it was about to train in a step."""
    records: list[Record] = job.files[name]
    for place, record in enumerate(records):
        if isinstance(record, Intent) and record.step == step:
            records[place] = msgspec.structs.replace(record, ids=compact(ids))


def ids_of(job: WrittenJob, name: str, step: int) -> list[int]:
    (found,) = (r for r in job.files[name] if isinstance(r, Intent) and r.step == step)
    return list(map(int, expand(found.ids)))


def test_whole_epochs_without_trouble_are_exact() -> None:
    job = WrittenJob()
    job.train(2 * STEPS)
    findings = findings_of(job)
    assert findings.is_exact
    assert (findings.steps, findings.whole_epochs(), findings.redone, findings.workers) == (8, 2, 0, 3)
    assert list(format_findings(findings))[-1] == "exactly once: yes"


def test_samples_of_a_skipped_step_were_visited_and_are_told() -> None:
    job = WrittenJob()
    job.train(1)
    job.begin()
    job.apply(is_skipped=True)
    job.train(STEPS - 2)
    findings = findings_of(job)
    assert (findings.is_exact, findings.whole_epochs(), findings.epochs[0].skipped) == (True, 1, 10)
    assert "epoch 0: 10 samples visited and not trained: all workers have skipped their steps" in list(
        format_findings(findings)
    )


def test_a_step_before_which_the_script_has_left_its_epoch_is_none() -> None:
    """It was begun: backward() had run."""
    job = WrittenJob()
    job.train(1)
    job.begin()
    job.end_epoch()
    job.cursor = 0
    job.train(STEPS)
    findings = findings_of(job)
    assert (findings.is_exact, findings.steps, findings.redone) == (True, 1 + STEPS, 0)


def test_samples_that_the_order_leaves_out_are_not_lost() -> None:
    """Others in each epoch, as a DistributedSampler with drop_last leaves them out."""
    job = WrittenJob(left_out=3)
    job.train(2 * STEPS)
    findings = findings_of(job)
    assert (findings.is_exact, findings.whole_epochs()) == (True, 2)
    assert "epochs 0 to 1, each: 3 samples left out by the script's sampler (drop_last, a subset, a draw)" in list(
        format_findings(findings)
    )
    change(job, "a", 0, [*ids_of(job, "a", 0)[1:], ids_of(job, "a", 0)[1]])
    (lost, _) = findings_of(job).epochs
    assert not lost.is_exact
    assert len(lost.repeated) == 1
    change(job, "a", 0, [*ids_of(job, "a", 0)[:-1], 41])  # another one than those that it has listed
    assert findings_of(job).epochs[0].repeated == [41]


def test_samples_that_a_sampler_repeats_are_told_from_those_that_come_again() -> None:
    job = WrittenJob()
    job.train(STEPS)
    key = (job.run_id, job.generation)
    for name, records in job.files.items():
        job.files[name] = [records[0], Listed(*key, 0, 39, [], [0]), *records[1:]]
        started = next(place for place, each in enumerate(job.files[name]) if isinstance(each, Started))
        job.files[name][started] = msgspec.structs.replace(job.files[name][started], samples=0)
    found = findings_of(job)
    assert found.epochs[0].foreign == [39]  # position 39 should be another sample 0
    assert found.epochs[0].lost == [0]
    name, step = next(
        (name, each.step)
        for name, records in job.files.items()
        for each in records
        if isinstance(each, Intent) and 39 in expand(each.ids)
    )
    ids = ids_of(job, name, step)
    change(job, name, step, [0 if each == 39 else each for each in ids])
    (epoch,) = findings_of(job).epochs
    assert (epoch.is_exact, epoch.padding, epoch.end) == (True, 1, 40)


def test_an_unfinished_epoch_is_exact_so_far() -> None:
    job = WrittenJob()
    job.train(STEPS + 1)
    findings = findings_of(job)
    assert findings.is_exact
    assert "epoch 1: 10 samples; it is unfinished, 30 samples are left" in list(format_findings(findings))


def test_a_step_that_nobody_applied_and_that_was_done_again_counts_once() -> None:
    job = WrittenJob()
    job.train(1)
    job.begin()
    job.regroup(["a", "c"])
    job.train(STEPS - 1)
    findings = findings_of(job)
    assert findings.is_exact
    assert (findings.redone, findings.whole_epochs(), findings.generations) == (1, 1, 2)


def test_a_step_that_only_the_dead_had_applied_is_void() -> None:
    job = WrittenJob()
    job.train(1)
    job.begin()
    job.apply_in_vain(["b"])
    job.regroup(["a", "c"])
    job.train(STEPS - 1)
    findings = findings_of(job)
    assert findings.is_exact
    assert findings.redone == 1


def test_a_step_that_one_survivor_applied_stands_with_the_share_of_the_dead() -> None:
    job = WrittenJob()
    job.train(1)
    job.begin()
    job.apply(by=["a"])
    job.regroup(["a", "c"])
    job.train(STEPS - 2)
    findings = findings_of(job)
    assert findings.is_exact
    assert findings.redone == 0


def test_a_job_that_went_on_from_a_checkpoint_voids_what_came_after_it() -> None:
    job = WrittenJob()
    job.train(1)
    saved = job.step, job.epoch, job.cursor
    job.train(2)
    job.step, job.epoch, job.cursor = saved
    job.run_id, job.generation = 2, 0
    job.regroup(["d", "e"])
    job.train(STEPS - 1)
    findings = findings_of(job)
    assert findings.is_exact
    assert (findings.redone, findings.whole_epochs()) == (2, 1)


def test_the_share_of_a_host_whose_files_are_gone_is_proved_by_its_hash() -> None:
    job = WrittenJob()
    job.train(2)
    job.regroup(["a", "b"])
    job.train(2)
    del job.files["c"]
    findings = findings_of(job)
    assert findings.is_exact
    assert findings.epochs[0].proved_by_hash == 8
    assert any(
        "8 samples of workers whose files are missing; their hash is correct" in line
        for line in format_findings(findings)
    )


def test_missing_files_leave_an_unfinished_epoch_unproved() -> None:
    job = WrittenJob()
    job.train(2)
    del job.files["c"]
    findings = findings_of(job)
    assert not findings.is_exact
    assert findings.epochs[0].unproved == 8
    assert findings.epochs[0].lost == []


def test_a_sample_that_was_trained_in_place_of_another_is_named_and_so_is_the_other() -> None:
    job = WrittenJob()
    job.train(STEPS)
    wrong = ids_of(job, "b", 2)
    lost, wrong[0] = wrong[0], ids_of(job, "a", 0)[0]
    change(job, "b", 2, wrong)
    findings = findings_of(job)
    assert not findings.is_exact
    assert (findings.epochs[0].lost, findings.epochs[0].repeated) == ([lost], [wrong[0]])
    assert any("step 2" in problem for problem in findings.problems)
    words = list(format_findings(findings))
    assert f"epoch 0: LOST: {lost} (1 in all)" in words
    assert f"epoch 0: REPEATED: {wrong[0]} (1 in all)" in words


def test_a_sample_that_a_worker_did_not_write_down_is_not_taken_for_proved() -> None:
    """Its number is clear all the same: one is missing, and the sum is that of the missing one."""
    job = WrittenJob()
    job.train(STEPS)
    change(job, "b", 2, ids_of(job, "b", 2)[:-1])
    findings = findings_of(job)
    assert findings.is_exact
    assert findings.epochs[0].proved_by_hash == 1


def test_a_sample_more_than_agreed_is_found() -> None:
    job = WrittenJob()
    job.train(STEPS)
    change(job, "b", 2, [*ids_of(job, "b", 2), 1])
    findings = findings_of(job)
    assert findings.epochs[0].repeated == [1]
    assert any("step 2" in problem for problem in findings.problems)


def test_a_number_that_is_no_sample_is_named() -> None:
    job = WrittenJob()
    job.train(STEPS)
    change(job, "b", 2, [40, *ids_of(job, "b", 2)[1:]])
    assert findings_of(job).epochs[0].foreign == [40]


def test_at_most_20_samples_are_named_format_findings_and_all_in_json() -> None:
    job = WrittenJob(samples=300, global_batch_size=100, members=["a"])
    job.train(3)
    change(job, "a", 1, ids_of(job, "a", 0))
    findings = findings_of(job)
    assert len(findings.epochs[0].lost) == len(findings.epochs[0].repeated) == 100
    (line,) = (line for line in format_findings(findings) if "LOST" in line)
    assert line.endswith(" 119, ... (100 in all)")
    assert msgspec.json.decode(as_json(findings))["epochs"][0]["lost"] == list(range(100, 200))


def test_a_step_that_no_file_has_as_applied_is_a_hole() -> None:
    job = WrittenJob()
    job.train(1)
    job.begin()
    job.apply(by=[])
    job.train(1)
    findings = findings_of(job)
    assert not findings.is_exact
    assert any("step 1 had been applied" in problem for problem in findings.problems)


def test_a_last_step_that_no_file_has_as_applied_is_a_hole_once_a_generation_starts_behind_it() -> None:
    job = WrittenJob()
    job.train(1)
    job.begin()
    job.apply(by=[])
    job.regroup(["a"])
    assert any("step 1 had been applied" in problem for problem in findings_of(job).problems)


def test_an_epoch_that_was_ended_by_break_is_said_to_be_so() -> None:
    job = WrittenJob()
    job.train(2)
    job.end_epoch()
    job.train(STEPS)
    findings = findings_of(job)
    assert findings.is_exact
    assert any("ended without 20 samples" in line for line in format_findings(findings))


def test_an_epoch_that_nobody_has_ended_is_not_left_in_silence() -> None:
    job = WrittenJob()
    job.train(2)
    job.epoch, job.cursor = 1, 0
    job.train(STEPS)
    findings = findings_of(job)
    assert any("epoch 0 was left at position 20 of 40" in problem for problem in findings.problems)


def test_an_end_of_an_epoch_that_was_handed_out_again_is_void() -> None:
    job = WrittenJob()
    job.train(2)
    epoch, cursor = job.epoch, job.cursor
    job.end_epoch()
    job.epoch, job.cursor = epoch, cursor
    job.regroup(["a", "b"])
    job.train(1)
    assert any("it is unfinished, 10 samples are left" in line for line in format_findings(findings_of(job)))


def test_a_ledger_may_begin_in_the_middle_of_an_epoch() -> None:
    job = WrittenJob()
    job.files.clear()
    job.step, job.epoch, job.cursor = 11, 2, 30
    job.regroup(["a"])
    job.train(1 + STEPS)
    findings = findings_of(job)
    assert findings.is_exact
    assert (findings.first_step, findings.whole_epochs()) == (11, 1)
    assert "epoch 2: 10 samples from position 30 on" in list(format_findings(findings))


def test_what_a_rank_said_last_of_a_step_is_what_it_contributed() -> None:
    """A script may leave the loop over batches before the step is made, and begin it again."""
    job = WrittenJob()
    job.begin()
    job.train(STEPS)
    assert findings_of(job).is_exact


def test_dummy_batches_have_no_samples() -> None:
    job = WrittenJob(samples=6, global_batch_size=2, members=["a", "b", "c"])
    job.train(3)
    assert any(isinstance(r, Intent) and r.low == r.high and r.ids == [] for r in job.files["a"])
    assert findings_of(job).is_exact


def test_tails_that_are_carried_count_for_the_epoch_that_they_are_of() -> None:
    job = WrittenJob(samples=35, global_batch_size=10, is_carried=True)
    job.train(14)
    findings = findings_of(job)
    assert findings.is_exact, findings
    assert (findings.whole_epochs(), len(findings.epochs)) == (4, 4)
    ids = ids_of(job, "c", 4)  # all of epoch 1
    change(job, "c", 4, [*ids[:-1], ids[0]])
    findings = findings_of(job)
    assert findings.epochs[0].is_exact
    assert (findings.epochs[1].lost, findings.epochs[1].repeated) == ([ids[-1]], [ids[0]])


def test_what_is_missing_of_a_step_in_two_epochs_is_not_proved() -> None:
    job = WrittenJob(samples=35, global_batch_size=10, is_carried=True)
    job.train(14)
    del job.files["c"]
    findings = findings_of(job)
    assert not findings.is_exact
    assert findings.epochs[1].unproved
    assert any("LOST, OR AMONG THE UNPROVED" in line for line in format_findings(findings))


def test_where_samples_are_drawn_by_weights_each_position_has_to_come_once() -> None:
    job = WrittenJob(order="weighted-1234")
    job.train(STEPS)
    findings = findings_of(job)
    assert findings.is_exact
    assert any("each position was trained once" in line for line in format_findings(findings))
    job.begin()
    job.apply(by=[])
    job.train(1)
    assert any("step 4 had been applied" in problem for problem in findings_of(job).problems)


def test_what_is_alike_of_many_epochs_is_said_once() -> None:
    job = WrittenJob()
    for _ in range(3):
        job.train(2)
        job.end_epoch()
    assert [line for line in format_findings(findings_of(job)) if line.startswith("epoch")] == [
        'epochs 0 to 2, each: 20 samples; it ended without 20 samples (break, or tail="drop")'
    ]


def test_two_jobs_in_one_folder_are_refused() -> None:
    lines = WrittenJob().lines()
    other = [
        dataclasses.replace(line, file="z-0000.jsonl", record=msgspec.structs.replace(line.record, nonce="other"))
        for line in lines
        if hasattr(line.record, "nonce")
    ]
    with pytest.raises(ConfigError, match="two jobs"):
        check([*lines, *other])


def test_a_ledger_without_a_generation_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        check([Line("a-0000.jsonl", 1, Opened(1, "whole", "a", "host", 1, 0))])


def test_a_line_that_was_cut_short_by_a_kill_is_normal_and_one_in_the_middle_is_not() -> None:
    job = WrittenJob()
    job.train(STEPS)
    lines = job.lines()
    assert check([*lines, Line("c-0000.jsonl", 99, None, is_cut_short=True)]).is_exact
    broken = check([lines[0], Line(lines[0].file, 2, None), *lines[1:]])
    assert broken.problems == ["a-0000.jsonl, line 2 cannot be read"]


def test_a_full_disk_is_said_and_disproves_nothing_that_is_proved_otherwise() -> None:
    job = WrittenJob()
    job.train(STEPS)
    job.files["b"] = [msgspec.structs.replace(job.files["b"][0], status=HOLED), *job.files["b"][1:4]]
    torn = [Line("b-0000.jsonl", 5, None), Line("b-0000.jsonl", 6, Missed(5))]
    lines = [line for line in job.lines() if line.file.startswith("b")] + torn
    findings = check([*lines, *(line for line in job.lines() if not line.file.startswith("b"))])
    assert findings.is_exact
    assert findings.remarks == ["b-0000.jsonl is incomplete: its worker could not write all lines (full disk?)"]


def test_of_streams_the_first_samples_of_each_have_to_come_once_without_a_gap() -> None:
    job = WrittenJob(order=TWO_STREAMS)
    job.train(2 * STEPS)
    job.end_epoch()
    job.train()  # of a third epoch, which is unfinished
    findings = findings_of(job)
    assert findings.is_exact, findings
    assert (findings.samples, findings.streams, findings.whole_epochs()) == (0, 2, 2)
    assert "2 ended epochs of 2 streams" in "\n".join(format_findings(findings))


def test_a_gap_in_a_stream_is_named_also_in_an_unfinished_epoch() -> None:
    job = WrittenJob(order=TWO_STREAMS)
    job.train(2)
    lost, *others = ids_of(job, "b", 1)
    change(job, "b", 1, [others[0], *others])
    (epoch,) = findings_of(job).epochs
    assert (epoch.lost, epoch.repeated) == ([lost], [others[0]])
    change(job, "b", 1, [10**12, *others])
    (epoch,) = findings_of(job).epochs
    assert epoch.foreign == [10**12]


def test_what_a_missing_file_has_of_streams_is_proved_by_its_hash_where_it_left_gaps() -> None:
    job = WrittenJob(order=TWO_STREAMS)
    job.train(2)
    job.regroup(["a", "b"])
    job.train(2)
    del job.files["c"]
    findings = findings_of(job)
    assert findings.is_exact, findings
    assert findings.epochs[0].proved_by_hash == 8
