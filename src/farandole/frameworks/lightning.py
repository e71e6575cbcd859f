"""Lightning's Trainer, elastic. It is `pip install 'farandole[lightning]'`."""

from farandole.integrations.frameworks.lightning_trainer import (
    FarandoleStrategy as FarandoleStrategy,
    TrackerLogger as TrackerLogger,
    Trainer as Trainer,
)

__all__ = ["FarandoleStrategy", "TrackerLogger", "Trainer"]
