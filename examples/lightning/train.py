"""Train a small CNN on scikit-learn's handwritten digits with Lightning, with as many workers as there are.

python train.py                                  one worker
farandole run -np 3 python train.py              three workers, elastic: kill one, and see

What differs from any other script for Lightning is marked with (*).
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import farandole as fd
from farandole.frameworks.lightning import Trainer


class Digits(pl.LightningModule):
    def __init__(self, epochs: int) -> None:
        super().__init__()
        self.epochs = epochs
        self.network = torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(16 * 4 * 4, 10),
        )

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.network(images), labels)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        images, labels = batch
        self.log("accuracy", (self.network(images).argmax(dim=1) == labels).float().mean())

    def on_validation_epoch_end(self) -> None:
        accuracy = self.trainer.callback_metrics["accuracy"]
        if self.trainer.is_global_zero and not self.trainer.sanity_checking:
            print(f"epoch {self.current_epoch + 1:3d}   accuracy {accuracy:.2%}   workers {fd.size()}", flush=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, fused=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    fd.init()  # (*)
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(data.target, dtype=torch.int64)
    train, validate = TensorDataset(images[360:], labels[360:]), TensorDataset(images[:360], labels[:360])

    loader = fd.elastic.DataLoader(train, global_batch_size=24, seed=0)  # (*)
    trainer = Trainer(  # (*) farandole's
        max_epochs=options.epochs, logger=False, enable_progress_bar=False, enable_checkpointing=False
    )
    trainer.fit(Digits(options.epochs), loader, DataLoader(validate, batch_size=120))
    print(f"worker {fd.rank()}: {trainer.global_step} steps", flush=True)


if __name__ == "__main__":
    main()
