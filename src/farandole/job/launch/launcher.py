"""The run of a JobSpec, with what it asks for around the job: report, page, files, checkpoints, state."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, nullcontext

from farandole.base.events.event import Event
from farandole.job.coordinator.transition import Outcome
from farandole.job.launch.checkpoint_place import beginning
from farandole.job.launch.job_files import EventFile
from farandole.job.launch.job_runner import NO_ADDITIONS, Additions, Surroundings, run_job
from farandole.job.launch.job_spec import JobSpec
from farandole.job.launch.job_state import FolderState, JobState
from farandole.job.launch.job_timeline import JobTimeline
from farandole.job.launch.output import output_options
from farandole.job.launch.page_address import PageProcess
from farandole.job.launch.report import Loudness, Report
from farandole.job.launch.terminal_line import job_line
from farandole.registry import factory


@contextlib.contextmanager
def reporting(spec: JobSpec, is_quiet: bool | None = None) -> Iterator[Report]:
    """Report on a job to standard error, beginning with its notes. `is_quiet`: the line of the job is shown on request
    alone; None: as its loudness says."""
    loudness = Loudness[spec.loudness]
    is_quiet = loudness == Loudness.QUIET if is_quiet is None else is_quiet
    report = Report(sys.stderr, loudness, line=job_line(spec.progress, is_quiet=is_quiet))
    try:
        for note in spec.notes:
            report.note(note)
        yield report
    finally:
        report.close()


def launch(spec: JobSpec, report: Report, additions: Additions = NO_ADDITIONS) -> Outcome:
    """Run a job, and return how it ended. Raises what run_job() and beginning() raise, and ConfigError for an address
    or a file that cannot be used."""
    output = output_options(spec)
    page = None if spec.page is None else PageProcess(spec.page)
    with (
        nullcontext() if page is None else closing(page),
        nullcontext() if spec.events is None else closing(EventFile(spec.events, report.note)) as events,
        _state(spec) as state,
        beginning(spec.checkpoint, state) as begun,
        nullcontext() if spec.timeline is None else closing(JobTimeline(spec.timeline, report.note)) as timeline,
    ):
        if additions.function is None:
            report.started(spec.config, spec.command)
        for note in (*([] if page is None else [page.notice]), *begun.notes):
            report.note(note)
        listeners = [*additions.listeners, report.on_event, begun.watch]
        listeners += [each.on_event for each in (events, timeline) if each is not None]

        def on_event(event: Event) -> None:
            for listener in listeners:
                listener(event)

        around = Surroundings(
            on_event=on_event,
            output=output,
            line=report.line,
            on_summary=report.on_summary,
            begun=begun,
            state=state,
            page=page,
        )
        return additions.run(run_job(spec, around, additions))


def _state(spec: JobSpec) -> AbstractContextManager[JobState | None]:
    if spec.state is None:
        return nullcontext()
    token = spec.joining.token if spec.joining is not None and spec.joining.token_file else None
    if isinstance(spec.state, str):  # an URL: joining.py has checked that there is a token
        state: AbstractContextManager[JobState] = factory("etcd state")(spec.state, spec.command, spec.config, token)
        return state
    return closing(FolderState(spec.state, spec.command, spec.config, token))
