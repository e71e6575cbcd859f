"""Elastic versions of trainers that own the training loop: `frameworks.lightning` and `frameworks.transformers`."""
