"""Trains a small model with Lightning, which logs to TensorBoard as it does by itself, and to a Tracker. Rank 0 is
killed between a step and its log, and behind a log, and leaves once."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from framework_model import EPOCHS, GLOBAL_BATCH_SIZE, digits, network, optimizer_of, scheduler_of
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader, TensorDataset
from tracked_job import Faults

import farandole as fd
from farandole.frameworks.lightning import TrackerLogger, Trainer


class Module(pl.LightningModule):
    def __init__(self, faults: Faults | None) -> None:
        super().__init__()
        self.net, self.faults = network(), faults
        self.save_hyperparameters({"width": 16})

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = optimizer_of(self)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler_of(optimizer), "interval": "step"}}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        weight = next(self.net.parameters())
        self.log("weight", weight.norm())
        if self.faults is not None and self.global_step:
            self.faults.behind_the_log(self.global_step)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.faults is not None:
            self.faults.before_the_log(self.global_step)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("accuracy", (self.net(batch[0]).argmax(dim=1) == batch[1]).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--faults", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    fd.init()
    trainer = Trainer(
        max_epochs=EPOCHS,
        logger=[TensorBoardLogger(options.folder), TrackerLogger(options.folder / "metrics.csv")],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    loader = fd.elastic.DataLoader(TensorDataset(*digits()), GLOBAL_BATCH_SIZE, seed=3)
    module = Module(Faults(options.folder, options.faults) if options.faults else None)
    trainer.fit(module, loader, DataLoader(TensorDataset(*digits(1000, 1100)), batch_size=64))


if __name__ == "__main__":
    main()
