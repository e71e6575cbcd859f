"""Trains a small model with transformers as people set it up: with a data set, in bfloat16, and with the best model
loaded at the end. Rank 0 is killed in the middle of writing the best checkpoint."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from framework_model import GLOBAL_BATCH_SIZE, STEPS_PER_EPOCH, digits, network

import farandole as fd
from farandole.frameworks.transformers import Trainer
from farandole.testing.step_records import Records

EPOCHS, BEST_EPOCH = 4, 2


class Digits(torch.utils.data.Dataset):
    def __init__(self, first: int, last: int) -> None:
        self.images, self.labels = digits(first, last)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"images": self.images[index].float(), "labels": self.labels[index]}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network().float()
        self.computed_with = ""

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(images)
        self.computed_with = str(logits.dtype)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class DyingTrainer(Trainer):
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        marker = Path(self.args.output_dir) / "killed"
        if self.state.global_step == BEST_EPOCH * STEPS_PER_EPOCH and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        super()._save_optimizer_and_scheduler(output_dir)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    fd.init()
    model = Model()
    arguments = transformers.TrainingArguments(
        output_dir=str(options.folder),
        num_train_epochs=EPOCHS,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="closeness",
        bf16=True,
        report_to=[],
        use_cpu=True,
    )

    def closeness(_: Any) -> dict[str, float]:
        return {"closeness": -abs(trainer.state.global_step - BEST_EPOCH * STEPS_PER_EPOCH)}

    trainer = DyingTrainer(
        model,
        arguments,
        train_dataset=Digits(0, 140),
        global_batch_size=GLOBAL_BATCH_SIZE,
        eval_dataset=Digits(1000, 1100),
        compute_metrics=closeness,
    )
    result = trainer.train()
    Records(str(options.folder)).at_end(
        argparse.Namespace(step=result.global_step, model=model),
        best=trainer.state.best_model_checkpoint,
        computed_with=model.computed_with,
        first=next(model.parameters()).flatten()[:5].tolist(),
    )


if __name__ == "__main__":
    main()
