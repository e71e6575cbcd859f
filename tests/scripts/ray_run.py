"""`farandole run [flags] command`, with the nodes of a Ray cluster as hosts. The cluster is that of RAY_ADDRESS."""

from __future__ import annotations

import asyncio
import os
import sys

import ray

from farandole.integrations.ray.ray_engine import RaySettings
from farandole.integrations.ray.ray_function import own_address, ray_engine, room_for_workers
from farandole.job.launch.arguments import FARANDOLE_RUN, parse_run
from farandole.job.launch.job_files import EventFile
from farandole.job.launch.job_runner import JobSetup, in_turn, run_job
from farandole.job.launch.output import output_options
from farandole.job.launch.report import Loudness, Report


def main() -> int:
    address = os.environ["RAY_ADDRESS"]
    ray.init(address=address, _node_ip_address=address.rpartition(":")[0], log_to_driver=False, logging_level="ERROR")
    options = parse_run(sys.argv[1:], FARANDOLE_RUN)
    room_for_workers(RaySettings())
    engine = ray_engine(options.config, RaySettings())
    report = Report(sys.stderr, Loudness[options.loudness])
    assert options.events is not None
    with EventFile(options.events, report.note) as events:
        on_event = in_turn(report.on_event, events.on_event)
        outcome = asyncio.run(
            run_job(
                JobSetup(
                    config=options.config,
                    command=options.command,
                    hosts=engine,
                    engine=engine.report_to(on_event),
                    host=own_address(),
                    output=output_options(options.config, None, False),
                    on_event=on_event,
                    extra_environment=options.environment,
                )
            )
        )
    report.ended(outcome.exit_code, outcome.reason)
    report.close()
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
