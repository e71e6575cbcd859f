"""`farandole run [flags] command` in tasks of a Spark application, as farandole.spark.run_elastic() has them.

The master of Spark is SPARK_MASTER.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys

from pyspark.sql import SparkSession

from farandole.integrations.spark.spark_engine import SparkEngine
from farandole.job.engines.host_list import HostSlots
from farandole.job.launch.arguments import FARANDOLE_RUN, parse_run
from farandole.job.launch.job_files import EventFile
from farandole.job.launch.job_runner import JobSetup, in_turn, run_job
from farandole.job.launch.output import output_options
from farandole.job.launch.report import Loudness, Report


def main() -> int:
    builder = SparkSession.builder.master(os.environ["SPARK_MASTER"]).config("spark.ui.enabled", "false")
    builder = builder.config("spark.executor.memory", "512m").config("spark.driver.host", "127.0.0.1")
    context = builder.config("spark.executorEnv.PYTHONPATH", os.environ["PYTHONPATH"]).getOrCreate().sparkContext
    context.setLogLevel("ERROR")
    options = parse_run(sys.argv[1:], FARANDOLE_RUN)
    config = dataclasses.replace(options.config, fills_slots=True)
    report = Report(sys.stderr, Loudness[options.loudness])
    assert options.events is not None
    with EventFile(options.events, report.note) as events:
        on_event = in_turn(report.on_event, events.on_event)
        outcome = asyncio.run(
            run_job(
                JobSetup(
                    config=config,
                    command=options.command,
                    hosts=tuple(HostSlots(f"spark-task-{index}", 1) for index in range(config.max_np or 0)),
                    engine=SparkEngine(context, {"PYTHONPATH": os.environ["PYTHONPATH"]}),
                    host="127.0.0.1",
                    output=output_options(config, None, False),
                    on_event=on_event,
                    extra_environment=options.environment,
                )
            )
        )
    report.ended(outcome.exit_code, outcome.reason)
    report.close()
    context.stop()
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
