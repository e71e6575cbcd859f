"""Trains a small model with transformers, and writes down what each worker did and what came of it."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from framework_model import EPOCHS, GLOBAL_BATCH_SIZE, MAX_NORM, digits, network, optimizer_of, scheduler_of, wait_for

import farandole as fd
from farandole.frameworks.transformers import Trainer
from farandole.testing.step_records import Records


class Digits(torch.utils.data.Dataset):
    def __init__(self, first: int, last: int) -> None:
        self.images, self.labels = digits(first, last)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"images": self.images[index], "labels": self.labels[index]}


class Model(torch.nn.Module):
    def __init__(self, before_step: Any) -> None:
        super().__init__()
        self.net, self.before_step = network(), before_step

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.before_step()
        logits = self.net(images)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Watch(transformers.TrainerCallback):
    def __init__(self, after_step: Any) -> None:
        self.after_step = after_step
        self.epochs: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.after_step()
        self.epochs.append(state.epoch)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slow-below", type=int, default=0)
    parser.add_argument("--micro-batch-size", type=int)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--records")
    options = parser.parse_args()
    torch.set_num_threads(1)
    fd.init()
    loader = fd.elastic.DataLoader(
        Digits(0, 140),
        GLOBAL_BATCH_SIZE,
        seed=3,
        micro_batch_size=options.micro_batch_size,
        collate_fn=transformers.default_data_collator,
    )
    records = Records(options.records)

    def place() -> Any:
        return SimpleNamespace(step=trainer.state.global_step, loader=loader, model=model)

    def before_step() -> None:
        records.before_step(place())
        wait_for(options.slow_below, fd.generation(), trainer.state.global_step)

    model = Model(before_step)
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer)
    watch = Watch(lambda: records.after_step(place()))
    arguments = transformers.TrainingArguments(
        output_dir=str(options.folder / "saved"),
        num_train_epochs=EPOCHS,
        max_grad_norm=MAX_NORM,
        eval_strategy="epoch",
        save_strategy="epoch",
        metric_for_best_model="accuracy",
        report_to=[],
        use_cpu=True,
        remove_unused_columns=False,
    )
    trainer = Trainer(
        model,
        arguments,
        train_loader=loader,
        eval_dataset=Digits(1000, 1100),
        compute_metrics=lambda p: {"accuracy": (p.predictions.argmax(axis=1) == p.label_ids).mean().item()},
        callbacks=[watch, transformers.EarlyStoppingCallback(early_stopping_patience=100)],
        optimizers=(optimizer, scheduler),
    )
    result = trainer.train()
    records.at_end(
        place(),
        scheduler_last_epoch=scheduler.last_epoch,
        result=result.global_step,
        epoch=round(trainer.state.epoch, 9),
        epochs=watch.epochs,
        best=trainer.state.best_metric,
    )
    if fd.rank() == 0:
        torch.save(model.net.state_dict(), options.folder / "result.pt")


if __name__ == "__main__":
    main()
