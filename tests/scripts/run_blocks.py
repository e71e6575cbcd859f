"""Run the Python blocks of the documentation, each in processes of its own.

A block finds the names that the text around it takes for granted: a model, a data set, a loader (PREPARED). Where a
block defines an elastic function `train` and does not call it, it is called. Prints a line for each block that failed;
the exit code is the number of them. Arguments: parts of the places of the blocks; without one, all.

Without an option a block runs in a process that is forked from this one: a world of one.
--workers N   in N such processes, a world of fixed size. What examples print is not compared: it is that of one.
--jobs N      blocks that have an elastic function, each as the script of a job of `farandole run -np N`
--block       the one block of this place, in this process
"""

from __future__ import annotations

import argparse
import ast
import doctest
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import farandole as fd
from tests.support.pages import Block, blocks_of_docstrings, blocks_of_pages

ROOT = Path(__file__).parents[2]
SAMPLES = 256
DEADLINE_S = 90.0


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


def run(block: Block, folder: str, compares: bool = True) -> None:
    """Run a block in this process. Raises what the block raises.

    compares  an example for doctest has to print what it shows
    """
    code = block.code
    if block.language == "doctest":
        code = "".join(example.source for example in doctest.DocTestParser().get_examples(block.code))
    if "fd.init(" not in code and "import farandole as fd" not in code:
        fd.init()
    prepared = Prepared(folder)
    names: dict[str, Any] = {"__name__": "__main__", **{name: prepared[name] for name in free_names(code)}}
    if block.language == "doctest" and compares:
        test = doctest.DocTestParser().get_doctest(block.code, names, block.place, None, 0)
        failures = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=sys.stderr.write)
        assert failures.failed == 0, "the example prints something else"
        return
    exec(compile(code, block.place, "exec"), names)
    if is_elastic(block) and "\ntrain(" not in code:
        names["train"](names.get("state") or prepared["state"])


def is_elastic(block: Block) -> bool:
    return "elastic.run\ndef train(" in block.code


def in_processes(block: Block, workers: int) -> bool:
    """Run a block in so many forked processes of one world; return whether it went well in all of them."""
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder:
        places = _places(workers)
        pids = [_fork(block, folder, place) for place in places]
        return _end_of(pids)


def _places(workers: int) -> list[dict[str, str]]:
    """The variables by which torchrun tells each process its place; none for a process alone."""
    if workers == 1:
        return [{}]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    same = {"WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(workers), "GROUP_RANK": "0"}
    same |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{**same, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(workers)]


def _fork(block: Block, folder: str, place: dict[str, str]) -> int:
    pid = os.fork()
    if pid != 0:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        os.environ.update(place)
        os.chdir(folder)
        run(block, folder, compares=not place)
        code = 0
    except BaseException:  # noqa: BLE001 - of any kind: this process ends here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_of(pids: Sequence[int]) -> bool:
    """Wait for processes; return whether all ended well. What still runs at the deadline is killed."""
    deadline_s = time.monotonic() + DEADLINE_S
    left, is_well = set(pids), True
    while left:
        for pid in [*left]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                left.discard(pid)
                is_well = is_well and status == 0
        if left and time.monotonic() > deadline_s:
            print(f"{len(left)} of {len(pids)} processes have not ended after {DEADLINE_S:g} s", flush=True)
            is_well, deadline_s = False, float("inf")
            for pid in left:
                os.killpg(pid, signal.SIGKILL)
        time.sleep(0.002)
    return is_well


def as_job(block: Block, workers: int) -> bool:
    """Run a block as the script of a job; return whether the job went well."""
    script = [sys.executable, str(Path(__file__).resolve()), "--block", block.place]
    flags = ["-np", str(workers), "--min-np", str(workers), "--restarts", "0", "--fork-server", "on", "--quiet"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    with tempfile.TemporaryDirectory() as folder:
        job = subprocess.Popen(
            [sys.executable, "-m", "farandole", "run", *flags, *script],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = job.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            said = f"not ended after {DEADLINE_S:g} s"
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)  # its workers end with it
                job.wait()
    if job.returncode:
        print(said, flush=True)
    return job.returncode == 0


def _import_ahead() -> None:
    """Import what blocks need, once and not in every process."""
    for name in ("torch._dynamo", "torch.distributed.fsdp", "farandole.sharding"):
        importlib.import_module(name)
    for name in fd.__all__:
        getattr(fd, name)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--block")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    blocks = [
        block
        for block in (*blocks_of_pages(), *blocks_of_docstrings())
        if block.language in ("python", "doctest") and not block.not_run
    ]
    if options.block is not None:
        run(next(block for block in blocks if block.place == options.block), os.getcwd())
        return 0
    chosen = [each for each in blocks if not options.parts or any(part in each.place for part in options.parts)]
    if options.jobs is not None:
        chosen = [block for block in chosen if is_elastic(block)]
        failed = [block.place for block in chosen if not as_job(block, options.jobs)]
    else:
        _import_ahead()
        failed = [block.place for block in chosen if not in_processes(block, options.workers)]
    print(f"{len(chosen)} blocks were run")
    print("".join(f"failed: {place}\n" for place in failed), end="")
    return min(len(failed), 100)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
