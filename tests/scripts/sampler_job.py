"""Epochs in Horovod's style over an ElasticSampler, for the sample ledger: commits every two batches; workers kill
themselves at known places, each once."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import farandole as fd

SAMPLES, BATCH_SIZE, EPOCHS = 101, 4, 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--killed", type=Path, required=True, help="a folder for the marks of those who kill themselves"
    )
    parser.add_argument("--kill", action="append", default=[], help="PLACE:EPOCH:BATCH, where rank 1 does")
    parser.add_argument("--indices", action="store_true", help="record_indices() in place of record_batch()")
    parser.add_argument("--stateful", action="store_true", help="torchdata's loader, with two loader workers")
    parser.add_argument("--pad", default=True)
    parser.add_argument("--after-break", choices=["reset", "nothing", "set_epoch"], help="break at the fifth batch")
    parser.add_argument("--records")
    options = parser.parse_args()
    torch.set_num_threads(1)
    fd.init()

    def die(place: str) -> None:
        name = f"{place}:{state.epoch}:{state.batch}"
        if name in options.kill and fd.rank() == 1 and not (options.killed / name).exists():
            (options.killed / name).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    dataset = torch.arange(SAMPLES)
    sampler = fd.elastic.ElasticSampler(dataset, seed=2, pad=options.pad)
    if options.stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader

        loader: Any = StatefulDataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler, num_workers=2)
    else:
        loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)
    model = torch.nn.Linear(1, 1)
    optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters())
    state = fd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0, was_broken=False)

    def train_batch(batch_idx: int, batch: torch.Tensor) -> None:
        die("before-step")
        optimizer.zero_grad()
        model(batch.float().unsqueeze(1) / SAMPLES).square().mean().backward()
        optimizer.step()
        die("before-record")
        if options.indices:
            sampler.record_indices(batch)
        else:
            sampler.record_batch(batch_idx, BATCH_SIZE)
        state.batch += 1
        if state.batch % 2 == 0:
            state.commit()
        die("after-commit")

    @fd.elastic.run
    def train(state: Any) -> None:
        while state.epoch < EPOCHS:
            while True:
                for batch_idx, batch in enumerate(loader):
                    if state.batch == 5 and options.after_break and not state.was_broken:
                        state.was_broken = True
                        break
                    train_batch(batch_idx, batch)
                else:
                    break
                die("after-break")
                if options.after_break == "set_epoch":
                    break
                if options.after_break == "reset":
                    sampler.reset()
                fd.allreduce(torch.ones(1), name="evaluated")
                die("evaluated")
            state.epoch, state.batch, state.was_broken = state.epoch + 1, 0, False
            sampler.set_epoch(state.epoch)
            state.commit()

    train(state)


if __name__ == "__main__":
    main()
