"""Scripts of torchrun that are elastic without a changed line: docs/decisions/elastic-in-place.md."""
