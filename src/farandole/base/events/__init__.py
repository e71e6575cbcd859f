"""The events of a job, one frozen dataclass per kind: for log, status page, metrics and tests alike."""
