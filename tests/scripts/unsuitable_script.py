"""Scripts for torchrun that cannot be elastic in place, each for one reason, and scripts with a mistake."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 (as people write it)
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        return iter(TensorDataset(torch.randn(32, 4)))


class Endless(Sampler):
    """A sampler as people write it for training by steps: each rank draws for ever."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(32, ()))


class Drawn(DistributedSampler):
    """A sampler that draws with the process's own random numbers, which are other ones on each worker."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(32).tolist()[self.rank :: self.num_replicas])


def batches(kind: str) -> DataLoader | list[list[torch.Tensor]]:
    table = TensorDataset(torch.randn(32, 4))
    if kind == "iterable":
        return DataLoader(Stream(), batch_size=4)
    if kind == "sampler":
        return DataLoader(table, batch_size=4, sampler=Drawn(table))
    if kind == "endless":
        return DataLoader(table, batch_size=4, sampler=Endless())
    if kind == "undivided":
        return DataLoader(table, batch_size=4, shuffle=True)
    if kind == "drawn":
        return [[torch.randn(4, 4)] for _ in range(8)]
    return DataLoader(table, batch_size=4, sampler=DistributedSampler(table))


def train_with_lightning() -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4))
    print(f"rank {trainer.global_rank} has finished", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    kind = parser.parse_args().kind
    torch.set_num_threads(1)
    if kind == "lightning":
        train_with_lightning()
        return
    if kind == "backend":
        dist.init_process_group("glooo")
    if kind == "size":
        dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=3)
    dist.init_process_group("gloo")
    if kind == "twice":
        dist.init_process_group("gloo")
    if kind == "subgroup":
        dist.new_group([0])
    model = DDP(torch.nn.Linear(4, 1), static_graph=kind == "static graph")
    other = torch.nn.Linear(4, 1)
    trained = [*model.parameters(), *(other.parameters() if kind == "mixed" else ())]
    optimizer = torch.optim.SGD(trained, lr=0.01)
    if kind == "alone":
        aside = torch.optim.SGD(other.parameters(), lr=0.01)
    for _ in range(2):
        with model.join() if kind == "join" else nullcontext():
            for number, (x,) in enumerate(batches(kind)):
                if number == {"endless": 8, "join": 4 - dist.get_rank()}.get(kind):
                    break
                loss = model(x).square().mean()
                if kind in ("alone", "mixed"):
                    loss = loss + other(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if kind == "alone":
                    aside.step()
    print(f"rank {dist.get_rank()} has finished", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
