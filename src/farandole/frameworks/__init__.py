"""Trainers that own the training loop, made elastic: `frameworks.lightning` and `frameworks.transformers`."""
