"""Trains a small model with Lightning, and writes down what each worker did and what came of it."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from framework_model import EPOCHS, GLOBAL_BATCH_SIZE, MAX_NORM, digits, network, optimizer_of, scheduler_of, wait_for
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, TQDMProgressBar
from torch.utils.data import DataLoader, TensorDataset

import farandole as fd
from farandole.frameworks.lightning import Trainer
from farandole.testing.step_records import Records


class Module(pl.LightningModule):
    def __init__(self, options: argparse.Namespace, loader: fd.elastic.DataLoader) -> None:
        super().__init__()
        self.net, self.options = network(), options
        if options.bfloat16:
            self.net.float()
        self.computed_with: str | None = None
        self.loader = loader
        self.records = Records(options.records)
        self.batches_seen: list[int] = []
        self.epochs_ended: list[int] = []
        self.estimated: float | None = None  # steps, as configure_optimizers() was told

    def place(self) -> Any:
        return SimpleNamespace(step=self.global_step, loader=self.loader, model=self)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = optimizer_of(self)
        scheduler: torch.optim.lr_scheduler.LRScheduler = scheduler_of(optimizer)
        if self.options.one_cycle:  # the recipe of Lightning's documentation
            self.estimated = self.trainer.estimated_stepping_batches
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=self.estimated)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.records.before_step(self.place())
        wait_for(self.options.slow_below, fd.generation(), self.global_step)
        images, labels = batch
        logits = self.net(images)
        self.computed_with = str(logits.dtype)
        loss = F.cross_entropy(logits, labels)
        self.log("loss", loss, sync_dist=self.options.sync_dist, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.records.after_step(self.place())
        self.batches_seen.append(batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(dim=1) == labels).double().mean())

    def on_train_epoch_end(self) -> None:
        self.epochs_ended.append(self.current_epoch)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slow-below", type=int, default=0)
    parser.add_argument("--micro-batch-size", type=int)
    parser.add_argument("--sync-dist", action="store_true")
    parser.add_argument("--one-cycle", action="store_true")
    parser.add_argument("--bar", action="store_true", help="of the progress")
    parser.add_argument("--bfloat16", action="store_true", help="mixed precision")
    parser.add_argument("--max-epochs", type=int, default=EPOCHS)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--records")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("error", category=UserWarning, module="torch")
    warnings.filterwarnings("error", message=".*not resumable")
    fd.init()
    images, labels = digits()
    loader = fd.elastic.DataLoader(
        TensorDataset(images.float() if options.bfloat16 else images, labels),
        GLOBAL_BATCH_SIZE,
        seed=3,
        micro_batch_size=options.micro_batch_size,
    )
    module = Module(options, loader)
    checkpoint = ModelCheckpoint(options.folder, filename="{epoch}-{step}", save_top_k=-1)
    bars = [TQDMProgressBar()] if options.bar else []  # that of rich needs a terminal
    trainer = Trainer(
        max_epochs=options.max_epochs,
        max_steps=options.max_steps,
        gradient_clip_val=MAX_NORM,
        callbacks=[checkpoint, EarlyStopping("accuracy", mode="max", patience=100), *bars],
        logger=False,
        enable_progress_bar=options.bar,
        enable_model_summary=False,
        log_every_n_steps=1,
        precision="bf16-mixed" if options.bfloat16 else None,
    )
    other_images, other_labels = digits(1000, 1200)
    validation = TensorDataset(other_images.float() if options.bfloat16 else other_images, other_labels)
    trainer.fit(module, loader, DataLoader(validation, batch_size=64))
    module.records.at_end(
        module.place(),
        scheduler_last_epoch=trainer.lr_scheduler_configs[0].scheduler.last_epoch,
        result=trainer.global_step,
        epoch=trainer.current_epoch,
        batches_seen=module.batches_seen,
        epochs_ended=module.epochs_ended,
        estimated=module.estimated,
        computed_with=module.computed_with,
    )
    if fd.rank() == 0:
        torch.save(module.net.state_dict(), options.folder / "result.pt")


if __name__ == "__main__":
    main()
