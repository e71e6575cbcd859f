"""Run the Python blocks of the documentation, each in a process of its own, forked from this one: a world of one.

A block finds the names that the text around it takes for granted: a model, a data set, a loader (PREPARED). Where a
block defines an elastic function `train` and does not call it, it is called. Prints a line for each block that failed;
the exit code is the number of them. Arguments: parts of the places of the blocks; without one, all.
"""

from __future__ import annotations

import ast
import doctest
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # here, so that not every process imports it
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard as fully_shard
from torch.utils.data import TensorDataset

import farandole as fd
import farandole.sharding
from tests.support.pages import Block, blocks_of_docstrings, blocks_of_pages

SAMPLES = 256


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Classifier(torch.nn.Module):
    """A model as those of transformers are: it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def _samples(count: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, 8), torch.randint(0, 3, (count,)))


def _module() -> Any:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


class Prepared:
    """The names that blocks take for granted, made when a block needs them."""

    def __init__(self, folder: str) -> None:
        self.made: dict[str, Any] = {"folder": folder}

    def __getitem__(self, name: str) -> Any:
        if name not in self.made:
            self.made[name] = PREPARED[name](self)
        return self.made[name]


PREPARED: dict[str, Callable[[Prepared], Any]] = {
    "F": lambda _: F,
    "Net": lambda _: Net,
    "classifier": lambda _: Classifier(),
    "critic": lambda _: Net(),
    "dataset": lambda _: _samples(SAMPLES),
    "ema": lambda has: torch.optim.swa_utils.AveragedModel(has["model"]),
    "evaluate": lambda _: lambda model: 0.5,
    "farandole": lambda _: fd,
    "fd": lambda _: fd,
    "first": lambda has: fd.DistributedOptimizer(torch.optim.SGD(has["generator"].parameters(), lr=0.1)),
    "folder": lambda _: None,
    "generator": lambda _: Net(),
    "hvd": lambda _: fd,
    "labelled": lambda has: [{"x": x, "labels": int(y)} for x, y in has["dataset"]],
    "loss": lambda _: torch.tensor(0.5),
    "loader": lambda has: fd.elastic.DataLoader(has["dataset"], global_batch_size=32),
    "model": lambda _: Net(),
    "module": lambda _: _module(),
    "optimizer": lambda has: fd.DistributedOptimizer(torch.optim.SGD(has["model"].parameters(), lr=0.1)),
    "scaler": lambda _: torch.amp.GradScaler("cpu"),
    "scheduler": lambda has: torch.optim.lr_scheduler.StepLR(has["optimizer"], 10),
    "second": lambda has: fd.DistributedOptimizer(torch.optim.SGD(has["critic"].parameters(), lr=0.1)),
    "share_of": lambda _: lambda number: (torch.randn(4, 8), torch.randint(0, 3, (4,)), 4),
    "state": lambda has: fd.elastic.TorchState(model=has["model"], optimizer=has["optimizer"], loader=has["loader"]),
    "os": lambda _: os,
    "sys": lambda _: sys,
    "torch": lambda _: torch,
    "validation_set": lambda _: _samples(64),
}


def free_names(code: str) -> list[str]:
    """Return the names that the code reads before it gives them a value."""
    bound: set[str] = set()
    free: list[str] = []
    for statement in ast.parse(code).body:
        names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        given = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        local = given if isinstance(statement, ast.FunctionDef) else set()
        free += [node.id for node in names if isinstance(node.ctx, ast.Load) and node.id not in bound | local]
        bound |= given - local
        bound |= {node.name for node in ast.walk(statement) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        for node in ast.walk(statement):
            if isinstance(node, ast.Import | ast.ImportFrom):
                bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return [name for name in dict.fromkeys(free) if name in PREPARED]


def run(block: Block, folder: str) -> None:
    """Run a block in this process. Raises what the block raises."""
    code = block.code
    if block.language == "doctest":
        code = "".join(example.source for example in doctest.DocTestParser().get_examples(block.code))
    if "fd.init(" not in code and "import farandole as fd" not in code:
        fd.init()
    prepared = Prepared(folder)
    names: dict[str, Any] = {"__name__": "__main__", **{name: prepared[name] for name in free_names(code)}}
    if block.language == "doctest":
        test = doctest.DocTestParser().get_doctest(block.code, names, block.place, None, 0)
        failures = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=sys.stderr.write)
        assert failures.failed == 0, "the example prints something else"
        return
    exec(compile(code, block.place, "exec"), names)
    if "elastic.run\ndef train(" in code and "\ntrain(" not in code:
        names["train"](names.get("state") or prepared["state"])


def in_process(block: Block) -> bool:
    """Run a block in a forked process; return whether it went well."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with tempfile.TemporaryDirectory() as folder:
                os.chdir(folder)
                run(block, folder)
            code = 0
        except BaseException:  # noqa: BLE001 - of any kind: this process ends here
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def main(wanted: Iterable[str]) -> int:
    torch.set_num_threads(1)
    for name in fd.__all__:  # once, and not in every process
        getattr(fd, name)
    blocks = [
        block for block in (*blocks_of_pages(), *blocks_of_docstrings()) if block.language in ("python", "doctest")
    ]
    parts = [*wanted]
    chosen = [each for each in blocks if not each.not_run and (not parts or any(part in each.place for part in parts))]
    failed = [block.place for block in chosen if not in_process(block)]
    print(f"{len(chosen)} blocks were run")
    print("".join(f"failed: {place}\n" for place in failed), end="")
    return min(len(failed), 100)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    sys.exit(main(sys.argv[1:]))
