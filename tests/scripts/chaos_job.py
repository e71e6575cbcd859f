"""The job of the chaos runs: three epochs, as fast as it is told, and records of what the tensors really hold."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from farandole.testing.faults.bringing import Orders

SAMPLES, BATCH, SEED, EPOCHS = 1053, 7, 11, 3
STEPS_PER_EPOCH = -(-SAMPLES // BATCH)
STEPS = EPOCHS * STEPS_PER_EPOCH


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pace", type=Path, help="a file: milliseconds that a step waits; read in each step")
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--width", type=int, default=8, help="of the hidden layers; 512: a state of 4 MB")
    parser.add_argument("--mean-each-step", action="store_true", help="a collective of the user's own")
    parser.add_argument("--records", required=True)
    options = parser.parse_args()
    train(options, Orders(options.records))  # before the first import that takes its time


def train(options: argparse.Namespace, orders: Orders) -> None:
    import time

    import torch
    import torch.nn.functional as F
    from chaos_data import Numbers

    import farandole as fd
    from farandole.base.liveness.status_reporting import report_progress
    from farandole.testing.quick_start import without_compiler
    from farandole.testing.step_records import Records

    torch.set_num_threads(1)
    torch.manual_seed(0)
    without_compiler()
    fd.init()
    width = options.width
    layers = [torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, width), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(width, 1)).double()
    optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    loader = fd.elastic.DataLoader(Numbers(SAMPLES), BATCH, seed=SEED, num_workers=options.num_workers)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, gamma=0.9)
    state = fd.elastic.TorchState(
        model=model, optimizer=optimizer, loader=loader, scheduler=scheduler, after_step=[scheduler.step], seen=0
    )
    records = Records(options.records)
    means: dict[int, float] = {}  # by applied steps

    def wait() -> None:
        """As long as the pace says, which may change meanwhile. Before the step is begun: what is done to a worker that
        has begun one is to hit it at work."""
        began = time.monotonic()
        while options.pace is not None:
            left_s = float(options.pace.read_text()) / 1e3 - (time.monotonic() - began)
            if left_s <= 0:
                return
            time.sleep(min(left_s, 0.01))
            report_progress()  # the step timeout is not for what the pace asks

    @fd.elastic.run
    def run(state: fd.elastic.TorchState) -> float:
        for _ in loader.epochs(EPOCHS):
            for x, y, indices in loader:
                wait()
                records.before_step(state, [] if loader.batch.is_dummy else indices.tolist())
                orders.check()
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                if is_applied := optimizer.step():
                    records.after_step(state)
                    state.seen += 1
                if options.mean_each_step:
                    mean = fd.mean(loss.item())
                    if is_applied:
                        means[state.step] = mean
        return fd.mean(float(state.step))

    result = run(state)
    (Path(options.records) / f"means-{fd.generation()}-{fd.rank()}.json").write_text(json.dumps(means))
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    shown = [*weights[:: 1 + len(weights) // 64].tolist(), weights.norm().item()]
    records.at_end(state, scheduler_last_epoch=scheduler.last_epoch, seen=state.seen, result=result, weights=shown)


if __name__ == "__main__":
    main()
