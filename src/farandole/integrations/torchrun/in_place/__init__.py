"""Scripts of torchrun that are elastic without a changed line: docs/decisions/0038-elastic-in-place.md."""
