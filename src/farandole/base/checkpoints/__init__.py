"""The folder of a job's checkpoints: names, manifests, the stores that have them, and when one is due."""
