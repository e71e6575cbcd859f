"""Horovod's functions in a Spark application; they need `pip install 'farandole[spark]'`. Its estimators do not exist
here."""

from farandole.integrations.spark.spark_function import run as run, run_elastic as run_elastic

__all__ = ["run", "run_elastic"]
