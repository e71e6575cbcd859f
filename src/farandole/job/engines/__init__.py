"""Engines: where the hosts of a job come from, and what runs our agent there."""
