"""Jobs in a Spark application: `farandole.spark.run(func)`, `run_elastic`, and `ParquetRows`, the rows of a data frame
that Spark has written as a data set. It is `pip install 'farandole[spark]'`."""

from farandole.integrations.spark.parquet_rows import ParquetRows as ParquetRows
from farandole.integrations.spark.spark_function import run as run, run_elastic as run_elastic

__all__ = ["ParquetRows", "run", "run_elastic"]
