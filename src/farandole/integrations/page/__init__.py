"""The live page of a job, and its metrics for Prometheus: a client of the coordinator that serves browsers."""
