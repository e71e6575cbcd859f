"""A small elastic job for tests: fast steps, a model with BatchNorm and dropout, records of every step."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import farandole as fd
from farandole.testing.quick_start import without_compiler
from farandole.testing.step_records import Records


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--stop", type=Path, help="end after the epoch in which this file is there")
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--global-batch-size", type=int, default=12)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--item-ms", type=float, default=0.0, help="what one sample costs")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--frozen-mb", type=int, default=0, help="parameters that only have to be copied")
    parser.add_argument("--raise-once", type=Path, help="rank 1 makes this file at step 50, and raises")
    parser.add_argument("--exit-once", type=Path, help="rank 1 makes this file at step 50, and exits with code 0")
    parser.add_argument("--eat", type=Path, help="the process whose number is in this file takes a gigabyte")
    parser.add_argument("--hold", type=Path, help="the process whose number is in this file holds the GIL for 3 s")
    parser.add_argument("--stubborn", action="store_true", help="loader workers ignore all signals that can be ignored")
    parser.add_argument("--device", default="cpu", help="slot: that of the worker's slot")
    parser.add_argument("--mean-each-step", action="store_true", help="a collective of the user's own")
    parser.add_argument("--log", action="store_true", help="show the loss on the job's page")
    parser.add_argument("--records")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    without_compiler()
    fd.init()

    class Numbers(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return options.samples

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            time.sleep(options.item_ms / 1e3)
            if options.stubborn and torch.utils.data.get_worker_info() is not None:
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
                    signal.signal(number, signal.SIG_IGN)
            x = torch.linspace(-1, 1, 8) * (index / options.samples)
            return x, x.sum(dim=0, keepdim=True)

    model = torch.nn.Sequential(
        torch.nn.Linear(8, options.width),
        torch.nn.BatchNorm1d(options.width),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(options.width, 1),
    )
    device = fd.device() if options.device == "slot" else torch.device(options.device)
    model.to(device)
    if options.frozen_mb:
        model.frozen = torch.nn.Parameter(torch.rand(options.frozen_mb << 18, device=device), requires_grad=False)
    optimizer = fd.DistributedOptimizer(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3))
    loader = fd.elastic.DataLoader(
        Numbers(),
        global_batch_size=options.global_batch_size,
        seed=3,
        num_workers=options.num_workers,
        min_local_batch=2,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, gamma=0.9)
    state = fd.elastic.TorchState(
        model=model,
        optimizer=optimizer,
        loader=loader,
        scheduler=scheduler,
        after_step=[scheduler.step],
        seen=0,
    )
    records = Records(options.records)

    @fd.elastic.run
    def train(state: fd.elastic.TorchState) -> float:
        for _ in loader.epochs(options.epochs):
            for x, y in loader:
                records.before_step(state)
                if options.raise_once and state.step == 50 and fd.rank() == 1 and not options.raise_once.exists():
                    options.raise_once.touch()
                    raise ArithmeticError("only once, only here")
                if options.exit_once and state.step == 50 and fd.rank() == 1 and not options.exit_once.exists():
                    options.exit_once.touch()
                    os._exit(0)
                if options.eat and options.eat.exists() and options.eat.read_text() == str(os.getpid()):
                    bytearray(b"x" * (1 << 30))
                if options.hold and options.hold.exists() and options.hold.read_text() == str(os.getpid()):
                    options.hold.unlink()
                    ctypes.PyDLL(None).usleep(3_000_000)  # no other thread of this process runs
                optimizer.zero_grad()
                loss = F.mse_loss(model(x.to(device)), y.to(device))
                loss.backward()
                if options.log:
                    state.log(loss=loss, lr=scheduler.get_last_lr()[0])
                if optimizer.step():
                    records.after_step(state)
                    state.seen += 1
                if options.mean_each_step:
                    fd.mean(loss.item())
            fd.mean(1.0)
            if options.stop and fd.any(options.stop.exists()):
                break
        return fd.mean(float(state.step))

    result = train(state)
    records.at_end(state, scheduler_last_epoch=scheduler.last_epoch, seen=state.seen, result=result)
    print(f"rank {fd.rank()} is through after {state.step} steps", flush=True)


if __name__ == "__main__":
    main()
