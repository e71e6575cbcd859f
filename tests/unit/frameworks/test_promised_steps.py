"""A trainer makes as many steps as it has promised, also to the scheduler that was made for so many."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import farandole as fd

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

SIZE, GLOBAL_BATCH_SIZE, STEPS_PER_EPOCH = 40, 4, 10


@pytest.fixture(autouse=True)
def initialized() -> Iterator[None]:
    fd.init()
    yield
    fd.shutdown()


@pytest.mark.parametrize(
    ("settings", "micro_batch_size", "steps"),
    [
        ({"max_epochs": 4}, None, 40),
        ({"max_epochs": 4}, 1, 40),
        ({"max_epochs": 4, "max_steps": 17}, None, 17),
        ({"max_steps": 17}, 2, 17),
        ({"max_epochs": 4, "limit_train_batches": 3}, None, 12),
    ],
)
def test_lightning_makes_the_steps_that_configure_optimizers_was_told(
    settings: dict[str, Any], micro_batch_size: int | None, steps: int
) -> None:
    pl = pytest.importorskip("lightning.pytorch")
    from farandole.frameworks.lightning import Trainer

    class Module(pl.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)
            self.estimated = 0

        def training_step(self, batch: Any) -> torch.Tensor:
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            """The recipe of Lightning's documentation."""
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            self.estimated = self.trainer.estimated_stepping_batches
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=self.estimated)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    data = torch.utils.data.TensorDataset(torch.randn(SIZE, 2))
    loader = fd.elastic.DataLoader(data, GLOBAL_BATCH_SIZE, micro_batch_size=micro_batch_size)
    trainer = Trainer(
        **settings, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
    )
    module = Module()
    trainer.fit(module, loader)
    assert (module.estimated, trainer.global_step) == (steps, steps)
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == steps


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((2,), index / SIZE)}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).square().mean()}


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"num_train_epochs": 4}, 40),
        ({"num_train_epochs": 2.5}, 25),
        ({"num_train_epochs": 0.3}, 3),
        ({"max_steps": 17}, 17),
        ({"num_train_epochs": 1, "max_steps": 17}, 17),
    ],
)
def test_transformers_makes_the_steps_that_its_scheduler_was_made_for(
    tmp_path: Path, settings: dict[str, Any], steps: int
) -> None:
    transformers = pytest.importorskip("transformers")
    from farandole.frameworks.transformers import Trainer

    arguments = transformers.TrainingArguments(
        str(tmp_path),
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        remove_unused_columns=False,
        warmup_steps=0.2,  # a share of all steps
        lr_scheduler_type="linear",
        learning_rate=1.0,
        **settings,
    )
    rates: list[float] = []

    class Watch(transformers.TrainerCallback):  # type: ignore[name-defined, misc]
        def on_step_end(self, *args: Any, lr_scheduler: Any, **kwargs: Any) -> None:
            rates.append(lr_scheduler.get_last_lr()[0])

    loader = fd.elastic.DataLoader(Rows(), GLOBAL_BATCH_SIZE, collate_fn=transformers.default_data_collator)
    trainer = Trainer(Model(), arguments, train_loader=loader, callbacks=[Watch()])
    assert trainer.train().global_step == steps
    warm = -(-steps // 5)
    assert rates == pytest.approx(
        [step / warm if step < warm else (steps - step) / (steps - warm) for step in range(1, steps + 1)]
    )
