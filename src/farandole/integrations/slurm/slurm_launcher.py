"""The run of a job on the nodes of a Slurm allocation, and the return of the Slurm job to the queue. Registered in
registry.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from farandole.base.events.event import Event
from farandole.integrations.slurm.slurm_engine import SlurmEngine
from farandole.job.coordinator.coordinator_factory import CoordinatorFactory
from farandole.job.launch.job_runner import Additions
from farandole.job.launch.job_spec import JobSpec
from farandole.job.launch.launcher import launch
from farandole.job.launch.report import Report


def launch_in_slurm(spec: JobSpec, report: Report, factory: CoordinatorFactory | None) -> int:
    """Run a job whose `slurm` is given, and return its exit code. Raises what launch() raises."""
    assert spec.slurm is not None
    engine = SlurmEngine(spec.slurm, spec.ssh.python, spec.requeues)

    def make_engine(on_event: Callable[[Event], None]) -> SlurmEngine:
        report.detail(str(spec.slurm))
        return engine.report_to(on_event)

    additions = Additions(
        make_engine=make_engine,
        finds_hosts=True,
        listeners=(engine.watch,),
        reason_to_end=engine.reason_to_end,
        factory=factory,
    )
    outcome = launch(spec, report, additions)
    report.ended(outcome.exit_code, outcome.reason)
    if spec.requeues and engine.was_announced:
        report.note("the Slurm job goes back into the queue")  # before it ends this process, too
        if problem := asyncio.run(engine.requeue()):
            report.note(problem)
    return outcome.exit_code
