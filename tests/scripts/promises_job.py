"""Trains a small model in one of several ways in which a script may do less than it seems to, or do something twice.

range   an epoch loop over range(), as with torch's own loader
break   early stopping in the middle of the second epoch of four
save    stopped behind the second epoch of four, having saved its own state there; `save` again goes on from that
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import farandole as fd

SAMPLES, GLOBAL_BATCH_SIZE, EPOCHS = 40, 4, 4


class Numbers(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.arange(float(SAMPLES)).unsqueeze(1))


def make_loader(kind: str) -> Any:
    if kind == "stream":
        return fd.elastic.StreamLoader(Numbers(), GLOBAL_BATCH_SIZE)
    return fd.elastic.DataLoader(torch.arange(float(SAMPLES)).unsqueeze(1), GLOBAL_BATCH_SIZE, seed=3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=["range", "break", "save"])
    parser.add_argument("--loader", choices=["map", "stream"], default="map")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    fd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4))
    loader = make_loader(options.loader)
    saved = options.folder / "saved.pt" if options.folder is not None else Path(os.devnull)
    is_resumed = options.way == "save" and saved.exists()
    if is_resumed:
        kept = torch.load(saved)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        loader.load_state_dict(kept["loader"])
    state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)

    def train_epoch(steps: int = SAMPLES) -> None:
        for number, x in enumerate(loader, start=1):
            optimizer.zero_grad()
            model(x / SAMPLES).square().mean().backward()
            optimizer.step()
            if number == steps:
                break

    def tell(word: str, epoch: int) -> None:
        if fd.rank() == 0:
            with (options.folder / "told.jsonl").open("a") as file:
                file.write(json.dumps([word, epoch]) + "\n")

    def save() -> None:
        if fd.rank() == 0:
            parts = {"model": model, "optimizer": optimizer, "loader": loader}
            torch.save({name: part.state_dict() for name, part in parts.items()}, saved)

    @fd.elastic.run
    def train(state: Any) -> None:
        epochs: Iterable[Any] = range(EPOCHS) if options.way == "range" else loader.epochs(EPOCHS)
        for epoch in epochs:
            if options.way == "break" and epoch == 1:
                train_epoch(steps=3)
                break
            train_epoch()
            if options.way == "save":
                tell("tail", epoch)
                epoch.once(partial(tell, "once", epoch))
                if epoch == 1 and not is_resumed:
                    save()
                    break

    train(state)
    print(f"trained {state.step} steps, to epoch {loader.epoch}")


if __name__ == "__main__":
    main()
