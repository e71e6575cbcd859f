"""`farandole run [flags] command`, with the nodes of a Ray cluster as hosts. The cluster is that of RAY_ADDRESS."""

from __future__ import annotations

import dataclasses
import os
import sys

import ray

from farandole.integrations.ray.ray_engine import RaySettings
from farandole.integrations.ray.ray_function import own_address, ray_engine, room_for_workers
from farandole.job.launch.arguments import FARANDOLE_RUN, parse_run
from farandole.job.launch.job_runner import Additions
from farandole.job.launch.launcher import launch, reporting


def main() -> int:
    address = os.environ["RAY_ADDRESS"]
    ray.init(address=address, _node_ip_address=address.rpartition(":")[0], log_to_driver=False, logging_level="ERROR")
    spec = dataclasses.replace(parse_run(sys.argv[1:], FARANDOLE_RUN), host=own_address())
    room_for_workers(RaySettings())
    engine = ray_engine(spec.config, RaySettings())
    with reporting(spec) as report:
        outcome = launch(spec, report, Additions(make_engine=engine.report_to, finds_hosts=True))
        report.ended(outcome.exit_code, outcome.reason)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
