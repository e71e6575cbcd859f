"""The framework-free side of elastic training, where scripts look for it."""

from farandole.elastic import ObjectState, State, notification_manager, run_fn

__all__ = ["ObjectState", "State", "notification_manager", "run_fn"]
