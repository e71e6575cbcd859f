"""Trainers of others say what they cannot do under Farandole, and what to do instead, before anything is trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import farandole as fd
from farandole.errors import ConfigError, NotInitialized
from farandole.integrations.frameworks.feed import Feed

DATA = torch.utils.data.TensorDataset(torch.zeros(10, 2), torch.zeros(10))


@pytest.fixture
def initialized() -> Iterator[None]:
    fd.init()
    yield
    fd.shutdown()


@pytest.mark.usefixtures("initialized")
def test_a_feed_takes_elastic_loaders_with_equal_epochs_only() -> None:
    with pytest.raises(ConfigError, match=r"must be a farandole.elastic.DataLoader, got DataLoader"):
        Feed(torch.utils.data.DataLoader(DATA))
    with pytest.raises(ConfigError, match='tail="carry"'):
        Feed(fd.elastic.DataLoader(DATA, 4, tail="carry"))
    assert len(Feed(fd.elastic.DataLoader(DATA, 4))) == 3


# Lightning ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("initialized")
@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"max_epochs": 1, "accumulate_grad_batches": 2}, "micro_batch_size"),
        ({"max_epochs": 1, "precision": "16-mixed"}, "bf16-mixed"),
        ({"max_epochs": 1, "accelerator": "gpu"}, 'accelerator="cpu"'),
        ({"max_epochs": 1, "devices": 2}, "farandole run -np N"),
        ({"max_epochs": 1, "strategy": "ddp"}, "Farandole sets the strategy"),
        ({}, "max_epochs or max_steps"),
    ],
)
def test_a_trainer_of_lightning_refuses_settings(settings: dict[str, Any], advice: str) -> None:
    pytest.importorskip("lightning")
    from farandole.frameworks.lightning import Trainer

    with pytest.raises(ConfigError, match=advice):
        Trainer(**settings)


@pytest.mark.usefixtures("initialized")
@pytest.mark.filterwarnings("ignore::UserWarning")  # of Slurm, where that is installed
def test_a_trainer_of_lightning_takes_settings_that_ask_for_what_happens_anyway() -> None:
    pytest.importorskip("lightning")
    from farandole.frameworks.lightning import Trainer

    settings = {"devices": "auto", "strategy": "auto", "accelerator": "cpu", "num_nodes": 1, "precision": "32-true"}
    for more in ({}, {"precision": "bf16-mixed"}, {"precision": 64}):
        Trainer(max_epochs=1, logger=False, enable_checkpointing=False, **{**settings, **more})


def test_a_trainer_of_lightning_is_made_after_init() -> None:
    pytest.importorskip("lightning")
    from farandole.frameworks.lightning import Trainer

    with pytest.raises(NotInitialized):
        Trainer(max_epochs=1)


@pytest.mark.usefixtures("initialized")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_fit_refuses_a_plain_loader_manual_optimization_and_a_checkpoint() -> None:
    pl = pytest.importorskip("lightning.pytorch")
    from farandole.frameworks.lightning import Trainer

    class Module(pl.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self, is_automatic: bool = True) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)
            self.automatic_optimization = is_automatic

        def training_step(self, batch: Any) -> torch.Tensor:
            raise AssertionError

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def trainer() -> Any:
        return Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)

    elastic = fd.elastic.DataLoader(DATA, 4)
    with pytest.raises(ConfigError, match=r"fd.elastic.DataLoader\(dataset"):
        trainer().fit(Module(), torch.utils.data.DataLoader(DATA))
    with pytest.raises(ConfigError, match="automatic_optimization=False"):
        trainer().fit(Module(is_automatic=False), elastic)
    with pytest.raises(ConfigError, match="farandole run --checkpoint"):
        trainer().fit(Module(), elastic, ckpt_path="last")


# transformers ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("initialized")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("arguments", "more", "advice"),
    [
        ({"gradient_accumulation_steps": 2}, {}, "micro_batch_size"),
        ({"fp16": True}, {}, "bf16=True"),
        ({}, {"train_dataset": DATA}, "either train_loader, or train_dataset"),
        ({}, {"train_loader": None, "train_dataset": DATA}, "also needs global_batch_size.* is 8; .* steps of 32"),
        ({}, {"train_loader": None}, "Trainer needs train_loader"),
        ({}, {"model_init": lambda: torch.nn.Linear(2, 1)}, "pass the model"),
    ],
)
def test_a_trainer_of_transformers_refuses_settings(
    tmp_path: Path, arguments: dict[str, Any], more: dict[str, Any], advice: str
) -> None:
    transformers = pytest.importorskip("transformers")
    from farandole.frameworks.transformers import Trainer

    settings = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **arguments)
    with pytest.raises(ConfigError, match=advice):
        Trainer(torch.nn.Linear(2, 1), settings, **{"train_loader": fd.elastic.DataLoader(DATA, 4), **more})


@pytest.mark.usefixtures("initialized")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_train_refuses_a_checkpoint_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from farandole.frameworks.transformers import Trainer

    settings = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = Trainer(torch.nn.Linear(2, 1), settings, train_loader=fd.elastic.DataLoader(DATA, 4))
    with pytest.raises(ConfigError, match="farandole run --checkpoint"):
        trainer.train(resume_from_checkpoint=True)
