"""Optimizers of a data-parallel job: the reduction of gradients, and the step."""
