"""The framework-free side of elastic training, where scripts look for it."""

from farandole.elastic import ObjectState, State

__all__ = ["ObjectState", "State"]
