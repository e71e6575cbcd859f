"""transformers' Trainer, elastic. It is `pip install 'farandole[transformers]'`."""

from farandole.integrations.frameworks.transformers_trainer import (
    TrackerCallback as TrackerCallback,
    Trainer as Trainer,
)

__all__ = ["TrackerCallback", "Trainer"]
