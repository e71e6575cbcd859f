"""Jobs in a Spark application."""
