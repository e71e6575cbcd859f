"""`farandole run [flags] command` in tasks of a Spark application, as farandole.spark.run_elastic() has them.

The master of Spark is SPARK_MASTER.
"""

from __future__ import annotations

import dataclasses
import os
import sys

from pyspark.sql import SparkSession

from farandole.integrations.spark.spark_engine import SparkEngine
from farandole.job.engines.host_list import HostSlots
from farandole.job.launch.arguments import FARANDOLE_RUN, parse_run
from farandole.job.launch.job_runner import Additions
from farandole.job.launch.launcher import launch, reporting


def main() -> int:
    builder = SparkSession.builder.master(os.environ["SPARK_MASTER"]).config("spark.ui.enabled", "false")
    builder = builder.config("spark.executor.memory", "512m").config("spark.driver.host", "127.0.0.1")
    context = builder.config("spark.executorEnv.PYTHONPATH", os.environ["PYTHONPATH"]).getOrCreate().sparkContext
    context.setLogLevel("ERROR")
    spec = parse_run(sys.argv[1:], FARANDOLE_RUN)
    config = dataclasses.replace(spec.config, fills_slots=True)
    hosts = tuple(HostSlots(f"spark-task-{index}", 1) for index in range(config.most_workers))
    spec = dataclasses.replace(spec, config=config, hosts=hosts, host="127.0.0.1")
    engine = SparkEngine(context, {"PYTHONPATH": os.environ["PYTHONPATH"]})
    with reporting(spec) as report:
        outcome = launch(spec, report, Additions(make_engine=lambda _on_event: engine))
        report.ended(outcome.exit_code, outcome.reason)
    context.stop()
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
