"""What a script for torchrun does, without an import of ours: python contract_job.py PART. Workers print one line."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

RANK, SIZE = int(os.environ.get("RANK", -1)), int(os.environ.get("WORLD_SIZE", 1))
NAMES = [
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"),
]


def train(steps: int = 2, wrap: bool = False) -> float:
    """Make some steps, and return a number that depends on the weights of all."""
    torch.manual_seed(RANK)
    model: torch.nn.Module = torch.nn.Linear(2, 1)
    if wrap:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.full((4, 2), float(RANK))).sum().backward()
        optimizer.step()
    return sum(parameter.sum().item() for parameter in model.parameters())


def total() -> float:
    value = torch.ones(3) * (dist.get_rank() + 1)
    dist.all_reduce(value)
    return value[0].item()


def variables() -> str:
    assert int(os.environ["MASTER_PORT"]) > 0
    assert os.environ["TORCHELASTIC_RUN_ID"]
    assert os.environ["TORCHELASTIC_ERROR_FILE"].endswith("error.json")
    return " ".join(os.environ[name] for name in NAMES)


def groups() -> str:
    """Everything of c10d that needs the store: subgroups, barriers, a second init."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    whole = total()
    half = dist.new_group(list(range(SIZE // 2)))
    value = torch.ones(1)
    if RANK < SIZE // 2:
        dist.all_reduce(value, group=half)
    for each in range(3):
        group = dist.new_group([each, SIZE - 1 - each])
        if dist.get_rank(group) >= 0:
            dist.barrier(group)
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    store = dist.distributed_c10d._get_default_store()
    store.add("counted", 1)
    dist.barrier()
    assert store.add("counted", 0) == SIZE
    dist.destroy_process_group()
    again = []
    for _ in range(3):
        dist.init_process_group(timeout=timedelta(seconds=60))
        again.append(total())
        dist.destroy_process_group()
    return f"{whole} {value.item()} {again}"


def nanogpt() -> str:
    """The question that nanoGPT and many others ask."""
    is_ddp = int(os.environ.get("RANK", -1)) != -1
    if is_ddp:
        dist.init_process_group(backend="gloo")
    weight = train(wrap=is_ddp)
    if is_ddp:
        dist.destroy_process_group()
    return f"ddp={is_ddp} {weight:.6f}"


def ours() -> str:
    """The backend without an import, with and without what the environment says."""
    found = []
    for options in ({}, {"rank": RANK, "world_size": SIZE}, {"backend": "cpu:farandole"}):
        dist.init_process_group(**{"backend": "farandole", **options})
        assert "farandole" in dist.get_backend()
        found.append((dist.get_world_size(), dist.get_rank(), total()))
        dist.destroy_process_group()
    return str(found)


def own_port() -> str:
    """A port of the script's own: rank 0 serves the store there."""
    given = os.environ["MASTER_PORT"]
    ports = sys.argv[2:]
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", ports[0]
    dist.init_process_group("gloo", rank=RANK, world_size=SIZE, timeout=timedelta(seconds=60))
    first = total()
    dist.destroy_process_group()
    url = f"tcp://127.0.0.1:{ports[1]}"
    dist.init_process_group("gloo", init_method=url, rank=RANK, world_size=SIZE, timeout=timedelta(seconds=60))
    assert given not in ports
    return f"{first} {total()} {os.environ['TORCHELASTIC_USE_AGENT_STORE']}"


def alone() -> str:
    return f"{train():.6f}"


def accelerate() -> str:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(RANK)
    model = torch.nn.Linear(2, 1)
    data = torch.utils.data.DataLoader(torch.ones(12, 2), batch_size=2)
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data)
    batches = 0
    for batch in data:
        optimizer.zero_grad()
        accelerator.backward(model(batch).sum())
        optimizer.step()
        batches += 1
    weight = sum(parameter.sum().item() for parameter in model.parameters())
    return f"{accelerator.num_processes} {batches} {weight:.6f}"


def lightning() -> str:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 1)

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            return self.linear(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=SIZE, strategy="ddp", **off)
    torch.manual_seed(RANK)
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(12, 2), batch_size=2, num_workers=0))
    weight = sum(parameter.sum().item() for parameter in module.parameters())
    return f"{trainer.world_size} {trainer.global_step} {weight:.6f}"


def late() -> str:
    train()
    dist.init_process_group("gloo")
    return str(total())


def evaluate() -> str:
    with torch.no_grad():
        return str(torch.nn.Linear(2, 1)(torch.zeros(1, 2)).shape)


def dies() -> str:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    total()
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return str(total())


def misuse() -> str:
    """Errors that a script meets at once."""
    found = []
    attempts = (
        {"backend": "farandole", "world_size": SIZE + 1, "rank": RANK},
        {"backend": "farandole", "world_size": SIZE, "rank": (RANK + 1) % SIZE},
        {"backend": "farandoles"},
    )
    for options in attempts:
        try:
            dist.init_process_group(**options)
        except Exception as error:  # noqa: BLE001 - it is printed
            found.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    dist.init_process_group("farandole")
    try:
        dist.init_process_group("farandole")
    except ValueError as error:
        found.append(str(error))
    reader, writer = os.pipe()
    if not (child := os.fork()):
        try:
            total()
        except Exception as error:  # noqa: BLE001 - the parent prints it
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    found.append(os.read(reader, 4096).decode())
    return " | ".join([*found, str(total())])


def misuse_of_gloo() -> str:
    """The same of a script that does not know Farandole."""
    found = []
    short = timedelta(seconds=2)
    for options in ({"backend": "glooo"}, {"backend": "gloo", "rank": RANK, "world_size": SIZE + 1, "timeout": short}):
        try:
            dist.init_process_group(**options)
        except Exception as error:  # noqa: BLE001 - it is printed
            found.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        dist.init_process_group("gloo")
    except ValueError as error:
        found.append(str(error))
    return " | ".join([*found, str(total())])


def one_rank() -> str:
    """Rank 0 is the only one that calls it."""
    if RANK == 0:
        dist.init_process_group(sys.argv[2], timeout=timedelta(seconds=5))
    return "has ended"


if __name__ == "__main__":
    # In one write: under torchrun all ranks have one output, and lines of several writes would be mixed.
    sys.stdout.write(f"RESULT {RANK} {globals()[sys.argv[1]]()}\n")
    sys.stdout.flush()
    if dist.is_initialized():
        dist.destroy_process_group()
