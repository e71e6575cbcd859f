"""Trains a small model with transformers, which logs to TensorBoard as it does by itself, and to a Tracker. Rank 0 is
killed between a step and its log, and behind a log, and leaves once."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from framework_model import EPOCHS, GLOBAL_BATCH_SIZE, digits, network, optimizer_of, scheduler_of
from tracked_job import Faults

import farandole as fd
from farandole.frameworks.transformers import TrackerCallback, Trainer


class Digits(torch.utils.data.Dataset):
    def __init__(self, first: int, last: int) -> None:
        self.images, self.labels = digits(first, last)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"images": self.images[index], "labels": self.labels[index]}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(images)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Disturbing(transformers.TrainerCallback):
    """It comes behind the loggers."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.faults.before_the_log(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.faults.behind_the_log(state.global_step)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--faults", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    fd.init()
    model = Model()
    optimizer = optimizer_of(model)
    arguments = transformers.TrainingArguments(
        output_dir=str(options.folder),
        num_train_epochs=EPOCHS,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="tensorboard",
        use_cpu=True,
        remove_unused_columns=False,
    )
    trainer = Trainer(
        model,
        arguments,
        train_loader=fd.elastic.DataLoader(
            Digits(0, 140), GLOBAL_BATCH_SIZE, seed=3, collate_fn=transformers.default_data_collator
        ),
        eval_dataset=Digits(1000, 1100),
        compute_metrics=lambda p: {"accuracy": (p.predictions.argmax(axis=1) == p.label_ids).mean().item()},
        callbacks=[TrackerCallback(options.folder / "metrics.csv")],
        optimizers=(optimizer, scheduler_of(optimizer)),
    )
    if options.faults:
        trainer.add_callback(Disturbing(Faults(options.folder, options.faults)))
    trainer.train()


if __name__ == "__main__":
    main()
